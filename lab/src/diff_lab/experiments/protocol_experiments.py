"""Defines the experiments of which the protocol carries over to small models, and the paper's claim does not.

They are lm-evaluation-harness without examples (Table 1) and with five (Table 8), hallucination (Table 4), and sums
worked out step by step (Appendix C). The paper's models have 3B parameters, and reason after training on mathematics;
no model of the sizes trained here does. Which of two small models adds up better is a question of our own.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.experiments.experiment import (
    DIFF_AND_SOFTMAX,
    ComparisonRule,
    Experiment,
    Preset,
    compared_by,
    section,
)
from diff_lab.experiments.language_experiments import language_presets
from diff_lab.experiments.paper_preset import THREE_BILLION, PaperPreset, Stage, evaluation
from diff_lab.measure import harness
from diff_lab.measure.arithmetic import ANSWER_LENGTH, EXACT_MATCH
from diff_lab.measure.harness import AVERAGE, Harness
from diff_lab.measure.judge import JudgeOptions
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.record import Comparison, Headline, Result

# By the record's name and its coordinates, of DIFF and the Transformer; NaN where the paper gives no value.
Paper = Mapping[str, Mapping[Coordinates, tuple[float, float]]]

HARNESS_NOTES = (
    "No verdict: models of this size answer such tasks by chance, and what they answer says nothing about the paper's "
    "claim.",
    "Unless others are asked for, the questions are made from the held-out text (which of four pieces continues a "
    "beginning): the paper's seven tasks need the network and were not run here. Where there is one: --option "
    "tasks=table1, or the harness's names or .jsonl files of your own, separated by commas.",
)


def without_claim(pattern: str, paper: Paper) -> Callable[[Sequence[Result], Preset], list[Comparison]]:
    """Compare both variants in every number whose name fits the pattern, without a claim, beside the paper's."""

    def compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
        names = dict.fromkeys(record.name for record in records if re.fullmatch(pattern, record.name))
        rules = (ComparisonRule(name=name, paper=paper.get(name, {}).get, claimed=False) for name in names)
        return compared_by(*rules)(records, preset)

    return compare


def harness_experiment(
    name: str, shows: str, shots: Sequence[int], paper: Paper, paper_preset: PaperPreset, *notes: str
) -> Experiment:
    """Make an experiment of lm-evaluation-harness at each number of examples, with questions from held-out text."""
    return Experiment(
        name=name,
        shows=shows,
        presets=language_presets(
            cpu={"tasks": "", "questions": 200},
            gpu={"tasks": "", "questions": 1000},
            paper=paper_preset,
            cpu_minutes=0.5,
            gpu_minutes=0.5,
        ),
        compare=without_claim("harness/.+", paper),
        options=Harness,
        measurements=lambda preset: [
            MeasurementRequest(name="harness", options={**preset.options, "examples": count}) for count in shots
        ],
        notes=(*HARNESS_NOTES, *notes),
    )


_NO_EXAMPLES, _FIVE_EXAMPLES = Coordinates(examples=0), Coordinates(examples=5)


# The paper trained no Transformer of its own on as many tokens; other people's are not trained alike.
TABLE1_PAPER = {
    f"harness/{task}/{measure}": {_NO_EXAMPLES: (value, math.nan)}
    for (task, measure), value in zip(harness.TABLE_1_MEASURES.items(), harness.TABLE_1["DIFF-3B"], strict=True)
} | {AVERAGE: {_NO_EXAMPLES: (0.606, math.nan)}}


TABLE_1 = harness_experiment(
    "table1",
    "lm-evaluation-harness without examples (Table 1): the path, without a verdict",
    (0,),
    TABLE1_PAPER,
    PaperPreset(
        # 1T tokens.
        stages=(Stage(recipe="paper-3b", overrides=("train.steps=238419",), name="paper-3b-1t"),),
        variants=DIFF_AND_SOFTMAX[:1],
        evaluations=(evaluation("harness", tasks="table1", examples=0),),
        remarks=("The paper trained no Transformer of its own on as many tokens: it compares other people's.",),
    ),
    "The paper's averages after 1T tokens: DIFF-3B 60.6, OpenLLaMA-3B-v2 57.5, StableLM-base-alpha-3B-v2 56.8; the "
    "latter two are other people's models. For a checkpoint of your own: diff-lab eval CHECKPOINT --tasks "
    "table1.",
)

# DIFF and its Transformer, 3B parameters each. BoolQ is where DIFF is the worse one.
TABLE8_PAPER = {
    AVERAGE: {_NO_EXAMPLES: (0.562, 0.554), _FIVE_EXAMPLES: (0.580, 0.564)},
    "harness/boolq/acc": {_NO_EXAMPLES: (0.601, 0.629)},
}
SHOTS = (0, 5)

TABLE_8 = harness_experiment(
    "table8",
    "lm-evaluation-harness without and with five examples (Table 8): the path, without a verdict",
    SHOTS,
    TABLE8_PAPER,
    PaperPreset(evaluations=tuple(evaluation("harness", tasks="table1", examples=count) for count in SHOTS)),
    "The paper's averages after 350B tokens, Transformer and DIFF: 55.4 and 56.2 without examples, 56.4 and 58.0 with "
    "five.",
)

# DIFF and the Transformer, 3B parameters each; GPT-4o judged 100 answers of each set.
TABLE4_PAPER = {
    "hallucination/xsum": {NO_COORDINATES: (0.53, 0.44)},
    "hallucination/cnn_dm": {NO_COORDINATES: (0.41, 0.32)},
    "hallucination/multi_news": {NO_COORDINATES: (0.61, 0.42)},
    "hallucination/qasper": {NO_COORDINATES: (0.39, 0.28)},
    "hallucination/hotpotqa": {NO_COORDINATES: (0.46, 0.36)},
    "hallucination/2wikimqa": {NO_COORDINATES: (0.36, 0.29)},
}


TABLE_4 = Experiment(
    name="table4",
    shows="answers about documents that a judge finds free of hallucination (Table 4): the protocol, without a verdict",
    presets=language_presets(
        cpu={"sources": "", "documents": 60, "characters": 160, "new_tokens": 48, **JudgeOptions().model_dump()},
        gpu={"sources": "", "documents": 100, "characters": 1500, "new_tokens": 100, **JudgeOptions().model_dump()},
        paper=PaperPreset(
            evaluations=(
                evaluation(
                    "hallucination",
                    sources=",".join(f"{name.rpartition('/')[2]}.jsonl" for name in TABLE4_PAPER),
                    documents=100,
                    characters=12_000,
                    new_tokens=128,
                    judge="https://api.openai.com/v1",
                    judge_model="gpt-4o",
                ),
            ),
            remarks=(
                "The sets are files of yours: the fields document, question (none of a summary) and reference in each "
                "line. The judge's key is read from OPENAI_API_KEY. How much of a document is shown (12,000 characters "
                "fit 4K tokens) and how long an answer may be are ours to choose.",
            ),
        ),
        cpu_minutes=0.5,
        gpu_minutes=1,
    ),
    # Not what is told of a set besides: "hallucination/xsum/judge_tokens".
    compare=without_claim("hallucination/[^/]+", TABLE4_PAPER),
    measurements="hallucination",
    notes=(
        "No verdict: models of this size can neither answer questions nor summarise, and what they write says nothing "
        "about the paper's claim. The protocol is the paper's: a document, a greedy answer, a judge, the share of "
        "answers that are wholly supported.",
        "Unless others are asked for, the documents are pieces of the held-out text, each to be summarised, and the "
        "judge 'words' looks up whether every word of an answer stands in the document. For the paper's: --option "
        "sources=xsum.jsonl,cnn_dm.jsonl,… with lines of document, question and reference, --option judge=URL --option "
        "judge_model=NAME with the key in OPENAI_API_KEY.",
    ),
)

# DIFF and the Transformer after distillation: the average over eight sets of problems in per cent, the average answer.
APPENDIX_C_PAPER = {EXACT_MATCH: {NO_COORDINATES: (0.508, 0.433)}, ANSWER_LENGTH: {NO_COORDINATES: (6144.0, 6913.0)}}

# 20B tokens of it: 4768 steps of 4.2M.
MATHEMATICS = Stage(
    recipe="paper-3b",
    overrides=(
        "data.paths=[your-mathematics]",
        *section("train", steps=4768, learning_rate="8e-5", warmup_steps=100),
    ),
    name="paper-3b-mathematics",
)


APPENDIX_C = Experiment(
    name="appendix_c",
    shows="sums worked out step by step (the protocol of Appendix C)",
    presets={
        "cpu": Preset(
            recipe="arithmetic",
            overrides=(*section("train", steps=400, warmup_steps=50, checkpoint_every=200, evaluate_every=None),),
            learning_rates=(3e-3, 1e-2, 3e-2),
            sweep=("train.steps=150",),
            seeds=3,
            options={"problems": 128},
            minutes=4,
        ),
        "gpu": Preset(
            recipe="arithmetic",
            overrides=(
                *section("model", hidden_size=256, intermediate_size=688, num_hidden_layers=6, head_dim=32),
                *section("data", operations=6, largest=99, length=96, batch_size=128),
                *section("train", steps=2500, warmup_steps=200, evaluate_every=250, precision="bf16"),
            ),
            learning_rates=(5e-4, 1e-3, 2e-3),
            seeds=5,
            options={"problems": 500},
            minutes=20,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, MATHEMATICS),
            evaluations=(evaluation("arithmetic", problems=500, examples=8, new_tokens=128),),
            remarks=(
                "The paper trains its 3B models further on 20B tokens of mathematics, then on answers of a reasoning "
                "model, and asks eight sets of problems. The second stage here is the first of these two, at the "
                "learning rate of Section 3.3 and with a warm-up of our own; there is no recipe for the distillation, "
                "and the eight sets are not measured: what is printed asks for sums.",
            ),
        ),
    },
    compare=compared_by(
        ComparisonRule(name=EXACT_MATCH, paper=APPENDIX_C_PAPER[EXACT_MATCH].get, exploratory=True),
        ComparisonRule(name=ANSWER_LENGTH, paper=APPENDIX_C_PAPER[ANSWER_LENGTH].get, claimed=False),
    ),
    measurements="arithmetic",
    headline=lambda _: Headline(name=EXACT_MATCH, claim="DIFF works out more sums than the Transformer"),
    notes=(
        "Adding up numbers is no mathematical reasoning, and the paper's claim is about models of 3B parameters after "
        "20B tokens of mathematics and distillation from a reasoning model: which of two small models works out more "
        "sums is a question of our own. The paper's values are averages over eight sets of such problems and are not "
        "comparable with ours.",
        "The length of a right answer is fixed by the problem, so a difference in length comes from wrong answers.",
    ),
)
