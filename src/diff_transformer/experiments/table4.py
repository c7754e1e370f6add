"""Table 4: answers free of contextual hallucination. A protocol that runs; models of the sizes trained here cannot
answer, so nothing is claimed of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.eval.documents import text_part
from diff_transformer.eval.hallucination import measure_hallucination, read_sets
from diff_transformer.eval.judges import JUDGE_OPTIONS, judge_of
from diff_transformer.eval.sources import PAPER_SETS, Source, held_out_sources
from diff_transformer.experiments.cluster import Evaluation
from diff_transformer.experiments.framework import Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language_twins import language_twins
from diff_transformer.results import Comparison, Result, compare
from diff_transformer.train import Data

# DIFF and the Transformer, 3B parameters each; GPT-4o judged 100 answers of each set.
PAPER = {
    "hallucination/xsum": (0.53, 0.44),
    "hallucination/cnn_dm": (0.41, 0.32),
    "hallucination/multi_news": (0.61, 0.42),
    "hallucination/qasper": (0.39, 0.28),
    "hallucination/hotpotqa": (0.46, 0.36),
    "hallucination/2wikimqa": (0.36, 0.29),
}


def _check(options: Mapping[str, Any], data: Data) -> None:
    """Find the judge and read the documents."""
    judge_of(options)
    _read_sets(options, data)


def _read_sets(options: Mapping[str, Any], data: Data) -> dict[str, list[Source]]:
    documents, characters = options["documents"], options["characters"]
    if options["sources"]:
        return read_sets(options["sources"], documents=documents, characters=characters)
    text = text_part(data.batches)
    return {"held_out": held_out_sources(text, data.tokenizer, limit=documents, characters=characters)}


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    options = preset.options
    return measure_hallucination(
        run.model,
        run.data.tokenizer,
        _read_sets(options, run.data),
        judge_of(options, str(run.model.device)),
        run.arm.name,
        journal=run.folder.parent / "judgements.jsonl",
        new_tokens=options["new_tokens"],
        seed=run.seed,
    )


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    # Not what is told of a set besides: "hallucination/xsum/judge_tokens".
    names = dict.fromkeys(r.name for r in records if r.name.startswith("hallucination/") and r.name.count("/") == 1)
    return [compare(records, name, "diff", "softmax", paper=PAPER.get(name), claimed=False) for name in names]


def _options(documents: int, characters: int, new_tokens: int) -> dict[str, object]:
    sizes = {"documents": documents, "characters": characters, "new_tokens": new_tokens}
    return {"sources": "", **sizes, **JUDGE_OPTIONS}


TABLE_4 = Experiment(
    name="table4",
    shows="answers about documents that a judge finds free of hallucination (Table 4): the protocol, without a verdict",
    presets=language_twins(
        cpu=_options(60, 160, 48),
        gpu=_options(100, 1500, 100),
        paper=(
            Evaluation(
                measure="hallucination",
                options={
                    "sources": ",".join(PAPER_SETS),
                    "documents": 100,
                    "characters": 12_000,
                    "new_tokens": 128,
                    "judge": "https://api.openai.com/v1",
                    "judge_model": "gpt-4o",
                },
            ),
        ),
        remarks=(
            "The judge's key is read from OPENAI_API_KEY. How much of a document is shown (12,000 characters fit 4K "
            "tokens) and how long an answer may be are ours to choose.",
        ),
        cpu_minutes=0.5,
        gpu_minutes=1,
    ),
    compare=_compare,
    measure=_measure,
    check=_check,
    notes=(
        "No verdict: models of this size can neither answer questions nor summarise, and what they write says nothing "
        "about the paper's claim. The protocol is the paper's: a document, a greedy answer, a judge, the share of "
        "answers that are wholly supported.",
        "Unless others are asked for, the documents are pieces of the held-out text, each to be summarised, and the "
        "judge 'words' looks up whether every word of an answer stands in the document. For the paper's: --option "
        f"sources={','.join(PAPER_SETS)} or your own .jsonl files, --option judge=URL --option judge_model=NAME with "
        "the key in OPENAI_API_KEY, or --option judge=FOLDER for a local model.",
    ),
)
