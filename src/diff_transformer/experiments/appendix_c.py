"""Appendix C in small: sums worked out step by step, how often the result is right and how long the answer is.

The paper trains models of 3B parameters on 20B tokens of mathematics, then on answers of a reasoning model; no model of
the sizes trained here reasons. What carries over is the protocol.
"""

from collections.abc import Sequence

from diff_transformer.data import ArithmeticBatches
from diff_transformer.eval.arithmetic import ANSWER_LENGTH, EXACT_MATCH, arithmetic_records
from diff_transformer.experiments.cluster import THREE_BILLION, Evaluation, PaperPreset, Stage
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.results import Comparison, Result, compare

# DIFF and the Transformer after distillation: the average over eight sets of problems in per cent, the average answer.
PAPER = {EXACT_MATCH: (0.508, 0.433), ANSWER_LENGTH: (6144.0, 6913.0)}

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


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    batches = run.data.batches
    assert isinstance(batches, ArithmeticBatches)
    # The same problems for all seeds, which the documents of the records need.
    return arithmetic_records(
        run.model,
        run.data.tokenizer,
        batches,
        run.arm.name,
        problems=preset.options["problems"],
        model_seed=run.seed,
    )


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    groups = dict.fromkeys(record.group for record in records if record.name == EXACT_MATCH)
    return [
        compare(
            records, name, "diff", "softmax", group=group, paper=PAPER[name] if group is None else None, claimed=False
        )
        for name in (EXACT_MATCH, ANSWER_LENGTH)
        for group in groups
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
            arms=TWINS,
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
            arms=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=600",),
            seeds=5,
            options={"problems": 500},
            minutes=20,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, MATHEMATICS),
            arms=TWINS,
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
    compare=_compare,
    measure=_measure,
    validation=ACCURACY,
    notes=(
        "No verdict: adding up numbers is no mathematical reasoning, and the paper's claim is about models of 3B "
        "parameters after 20B tokens of mathematics and distillation from a reasoning model. The paper's values are "
        "averages over eight sets of such problems and are not comparable with ours. The difference between the twins "
        "here is a fact about this task at this size, whichever of them it favours.",
        "The length of a right answer is fixed by the problem, so a difference in length comes from wrong answers.",
    ),
)
