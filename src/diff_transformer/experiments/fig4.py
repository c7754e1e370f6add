"""Figure 4: the loss by position in long documents, after a short second stage of training on longer contexts."""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.eval.documents import text_part
from diff_transformer.eval.positions import measured_documents, position_marks, position_records
from diff_transformer.experiments.cluster import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import CPU, GPU, text_of
from diff_transformer.results import Comparison, Headline, Result, compare
from diff_transformer.train import Data

CUMULATIVE = "positions/cumulative_loss"
_SETTINGS = ("length", "first", "documents")


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    settings = {name: preset.options[name] for name in _SETTINGS}
    return position_records(run.model, text_of(run), run.arm.name, seed=run.seed, **settings)


def _check(options: Mapping[str, Any], data: Data) -> None:
    measured_documents(text_part(data.batches), **{name: options[name] for name in _SETTINGS})


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    marks = position_marks(preset.options["length"], preset.options["first"])
    return [compare(records, CUMULATIVE, "diff", "softmax", group=f"first {mark}") for mark in marks]


def _headline(options: Mapping[str, Any]) -> Headline:
    """The whole of the long documents."""
    return Headline(name=CUMULATIVE, group=f"first {position_marks(options['length'], options['first'])[-1]}")


FIG_4 = Experiment(
    name="fig4",
    shows="cumulative loss by position in long documents (Figure 4)",
    presets={
        # rope_theta × 64, as the paper's 3B model had it; its contexts grew to 16 times the length, in a far smaller
        # share of the steps. The learning rate is lower than any of the first stage's, as the paper's was.
        "cpu": Preset(
            recipe="language",
            overrides=(
                *CPU,
                "data.length=256",
                "data.batch_size=8",
                "model.hidden_size=64",
                "model.intermediate_size=168",
                "model.num_hidden_layers=4",
                "model.head_dim=8",
                "train.steps=500",
                "train.evaluate_every=500",
            ),
            arms=TWINS,
            learning_rates=(5e-3, 1.25e-2, 3e-2),
            sweep=("train.steps=170", "train.evaluate_every=170"),
            extension=(
                "data.length=1024",
                "data.batch_size=2",
                "model.rope_theta=640000",
                "train.steps=50",
                "train.evaluate_every=50",
                "train.warmup_steps=5",
                "train.learning_rate=1e-3",
            ),
            seeds=3,
            options={"length": 1024, "first": 64, "documents": 60},
            minutes=8,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*GPU, "train.steps=1500", "train.evaluate_every=1500"),
            arms=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=400", "train.evaluate_every=400"),
            extension=(
                "data.length=8192",
                "data.batch_size=4",
                "model.rope_theta=640000",
                "train.steps=150",
                "train.evaluate_every=150",
                "train.warmup_steps=15",
                "train.learning_rate=2.5e-4",
            ),
            seeds=3,
            options={"length": 8192, "first": 128, "documents": 100},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            arms=TWINS,
            evaluations=(
                Evaluation(
                    measure="positions", options={"length": 65536, "first": 1024, "documents": 100}, text="your-books"
                ),
            ),
            remarks=("The paper measures on books; it does not say on how many.",),
        ),
    },
    measure=_measure,
    compare=_compare,
    check=_check,
    headline=_headline,
    notes=(
        "The learning rate of the second stage is one and the same for both arms, fixed beforehand and not swept.",
        "The paper draws Figure 4 and gives no numbers: at every position DIFF's curve lies below.",
        "Whole documents are needed, as long as the longest context; of text of another kind name a folder (--text).",
    ),
)
