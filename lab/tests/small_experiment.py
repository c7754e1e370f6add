"""An experiment at a size of seconds, and what its runs tell."""

from pathlib import Path
from typing import Any

from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, ComparisonRule, Experiment, Preset, compared_by
from diff_lab.experiments.request import ExperimentRequest
from diff_lab.experiments.runner import run_experiment
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.measure.retrieval import ACCURACY, FIRST_QUERY
from diff_lab.measure.standard import Standard
from diff_lab.record import Headline, ResultsFile
from small_runs import Watcher

SIZES = (
    "model.hidden_size=16",
    "model.intermediate_size=16",
    "model.head_dim=8",
    "model.num_hidden_layers=1",
    "data.length=32",
    "data.num_pairs=2",
    "data.batch_size=2",
    "data.validation_sequences=4",
    "train.steps=2",
    "train.warmup_steps=0",
    "train.inspect_every=null",
)
TINY = Preset(
    recipe="retrieval",
    overrides=SIZES,
    variants=DIFF_AND_SOFTMAX,
    learning_rates=(1e-3, 2e-3),
    more_rates=0,
    seeds=2,
    options={"sequences": 8},
    minutes=0.1,
)
ATTENTION = ("retrieval/attention_to_answer_share", "retrieval/attention_noise_share")
NOTE = "Needles lie among noise."
SMALL = Experiment(
    name="recall",
    shows="needles found among noise tokens",
    presets={"cpu": TINY},
    requests=lambda preset: [MeasurementRequest(name="standard", options=preset.options)],
    options=Standard,
    compare=compared_by(ComparisonRule(names=(FIRST_QUERY, ACCURACY, *ATTENTION), exploratory=True)),
    headline=lambda _: Headline(name=FIRST_QUERY, claim="DIFF answers the first query more often than the Transformer"),
    notes=(NOTE,),
)


def trainings(folder: Path, request: ExperimentRequest, **settings: Any) -> tuple[list[str], ResultsFile]:
    """Which runs are trained, as the progress hears of them, and the results."""
    heard = Watcher()
    return heard.runs, run_experiment(request, folder, progress=heard, **settings)
