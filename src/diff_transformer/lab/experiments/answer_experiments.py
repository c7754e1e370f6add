"""Defines the experiments on free answers: hallucination (Table 4) and sums worked out step by step (Appendix C).

The paper's models have 3B parameters, and reason after training on mathematics; no model of the sizes trained here
does. What carries over is the protocol.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.lab.experiments.experiment import ACCURACY, TWINS, Experiment, MeasuredRun, Preset, measured_by
from diff_transformer.lab.experiments.language_experiments import language_twins
from diff_transformer.lab.experiments.paper_preset import THREE_BILLION, Evaluation, PaperPreset, Stage
from diff_transformer.lab.measure.arithmetic import ANSWER_LENGTH, EXACT_MATCH, ArithmeticOptions
from diff_transformer.lab.measure.hallucination import HallucinationOptions, measure_hallucination, read_sets
from diff_transformer.lab.measure.hallucination_data import PAPER_SETS, Source, held_out_sources
from diff_transformer.lab.measure.judge_endpoint import JudgeOptions, judge_of
from diff_transformer.lab.measure.standard import text_part
from diff_transformer.lab.record import Comparison, Result
from diff_transformer.lab.statistics import compare
from diff_transformer.train import Data

# DIFF and the Transformer, 3B parameters each; GPT-4o judged 100 answers of each set.
TABLE4_PAPER = {
    "hallucination/xsum": (0.53, 0.44),
    "hallucination/cnn_dm": (0.41, 0.32),
    "hallucination/multi_news": (0.61, 0.42),
    "hallucination/qasper": (0.39, 0.28),
    "hallucination/hotpotqa": (0.46, 0.36),
    "hallucination/2wikimqa": (0.36, 0.29),
}


def _check(options: Mapping[str, Any], data: Data) -> None:
    """Find the judge and read the documents."""
    judge_of(HallucinationOptions(**options))
    _read_sets(options, data)


def _read_sets(options: Mapping[str, Any], data: Data) -> dict[str, list[Source]]:
    documents, characters = options["documents"], options["characters"]
    if options["sources"]:
        return read_sets(options["sources"], documents=documents, characters=characters)
    text = text_part(data.batches)
    return {"held_out": held_out_sources(text, data.tokenizer, limit=documents, characters=characters)}


def _measure_table4(run: MeasuredRun, preset: Preset) -> list[Result]:
    options = preset.options
    return measure_hallucination(
        run.model,
        run.data.tokenizer,
        _read_sets(options, run.data),
        judge_of(HallucinationOptions(**options), str(run.model.device)),
        run.variant.name,
        journal=run.folder.parent / "judgements.jsonl",
        new_tokens=options["new_tokens"],
        seed=run.seed,
    )


def _compare_table4(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    # Not what is told of a set besides: "hallucination/xsum/judge_tokens".
    names = dict.fromkeys(r.name for r in records if r.name.startswith("hallucination/") and r.name.count("/") == 1)
    return [compare(records, name, "diff", "softmax", paper=TABLE4_PAPER.get(name), claimed=False) for name in names]


def _options(documents: int, characters: int, new_tokens: int) -> dict[str, object]:
    sizes = {"documents": documents, "characters": characters, "new_tokens": new_tokens}
    return {"sources": "", **sizes, **JudgeOptions().model_dump()}


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
    compare=_compare_table4,
    options=HallucinationOptions,
    measure=_measure_table4,
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

# DIFF and the Transformer after distillation: the average over eight sets of problems in per cent, the average answer.
APPENDIX_C_PAPER = {EXACT_MATCH: (0.508, 0.433), ANSWER_LENGTH: (6144.0, 6913.0)}

# 20B tokens of it: 4768 steps of 4.2M.
MATHEMATICS = Stage(
    recipe="paper-3b",
    overrides=(
        "data.paths=[your-mathematics]",
        "train.steps=4768",
        "train.learning_rate=8e-5",
        "train.warmup_steps=100",
    ),
    name="paper-3b-mathematics",
)


def _compare_appendix_c(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    places = dict.fromkeys(record.coordinates for record in records if record.name == EXACT_MATCH)
    return [
        compare(
            records,
            name,
            "diff",
            "softmax",
            coordinates=place,
            paper=APPENDIX_C_PAPER[name] if not place else None,
            claimed=False,
        )
        for name in (EXACT_MATCH, ANSWER_LENGTH)
        for place in places
    ]


APPENDIX_C = Experiment(
    name="appendix_c",
    shows="sums worked out step by step (the protocol of Appendix C, without a verdict)",
    presets={
        "cpu": Preset(
            recipe="arithmetic",
            overrides=(
                "train.steps=400",
                "train.warmup_steps=50",
                "train.checkpoint_every=200",
                "train.evaluate_every=null",
            ),
            variants=TWINS,
            learning_rates=(3e-3, 1e-2, 3e-2),
            sweep=("train.steps=150",),
            seeds=3,
            options={"problems": 128},
            minutes=4,
        ),
        "gpu": Preset(
            recipe="arithmetic",
            overrides=(
                "model.hidden_size=256",
                "model.intermediate_size=688",
                "model.num_hidden_layers=6",
                "model.head_dim=32",
                "data.operations=6",
                "data.largest=99",
                "data.length=96",
                "data.batch_size=128",
                "train.steps=2500",
                "train.warmup_steps=200",
                "train.evaluate_every=null",
                "train.precision=bf16",
            ),
            variants=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=600",),
            seeds=5,
            options={"problems": 500},
            minutes=20,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, MATHEMATICS),
            variants=TWINS,
            evaluations=(
                Evaluation(measure="arithmetic", options={"problems": 500, "examples": 8, "new_tokens": 128}),
            ),
            remarks=(
                "The paper trains its 3B models further on 20B tokens of mathematics, then on answers of a reasoning "
                "model, and asks eight sets of problems. The second stage here is the first of these two, at the "
                "learning rate of Section 3.3 and with a warm-up of our own; there is no recipe for the distillation, "
                "and the eight sets are not measured: what is printed asks for sums.",
            ),
        ),
    },
    compare=_compare_appendix_c,
    options=ArithmeticOptions,
    measurements=measured_by("arithmetic"),
    validation=ACCURACY,
    notes=(
        "No verdict: adding up numbers is no mathematical reasoning, and the paper's claim is about models of 3B "
        "parameters after 20B tokens of mathematics and distillation from a reasoning model. The paper's values are "
        "averages over eight sets of such problems and are not comparable with ours. The difference between the twins "
        "here is a fact about this task at this size, whichever of them it favours.",
        "The length of a right answer is fixed by the problem, so a difference in length comes from wrong answers.",
    ),
)
