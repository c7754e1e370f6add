"""Says how many trainings an experiment takes, how many are finished, and about how long the rest will take."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from diff_transformer.lab.experiments.experiment import Experiment, Preset, Variant, section
from diff_transformer.lab.experiments.run_store import Store, run_key
from diff_transformer.lab.measure.standard import validation_callback
from diff_transformer.train import Data, Recipe, build_data, build_model
from diff_transformer.train.distributed import DistributedContext
from diff_transformer.train.step import backward, build_optimizers

# Steps are timed for about so long, after the first, which takes longer.
_SECONDS, _MOST_STEPS = 1.0, 20


@dataclass(frozen=True)
class PlannedTrainings:
    """What an experiment is going to train: at least so many runs, of which some are finished; the rest takes about
    `seconds`, one after another, measurements not counted."""

    trainings: int
    finished: int
    seconds: float


def plan_trainings(
    experiment: Experiment,
    preset: Preset,
    runs: str | Path,
    seconds_of: Callable[[Recipe, Data], float] | None = None,
) -> PlannedTrainings:
    """Count the trainings of an experiment, whose finished runs lie in the folder `runs`, and time a few steps of each
    variant that has one to train.

    `seconds_of` says what a training takes; by default it is timed. Raises as `build_data`.
    """
    rates = preset.learning_rates or (None,)
    store, trainings, finished, seconds = Store(Path(runs)), 0, 0, 0.0
    data = [build_data(preset.variant_recipe(preset.variants[0], f"train.seed={seed}")) for seed in range(preset.seeds)]

    def is_finished(variant: Variant, rate: float | None, seed: int) -> bool:
        rate_and_seed = section("train", seed=seed, **({} if rate is None else {"learning_rate": rate}))
        recipe = preset.variant_recipe(variant, *rate_and_seed)
        return store.find(run_key(recipe, data[seed].batches, None, experiment.logs)) is not None

    for variant in preset.variants:
        # With the first seed every rate is tried, with the others the best, which is not known yet.
        done = sum(is_finished(variant, rate, 0) for rate in rates)
        done += sum(any(is_finished(variant, rate, seed) for rate in rates) for seed in range(1, preset.seeds))
        needed = len(rates) + preset.seeds - 1
        if needed > done:
            each = (seconds_of or timed_training)(preset.variant_recipe(variant), data[0])
            seconds += each * (needed - done)
        trainings, finished = trainings + needed, finished + done
    return PlannedTrainings(trainings, finished, seconds)


def timed_training(recipe: Recipe, data: Data) -> float:
    """About how many seconds a training takes on this machine, its validation included: a few steps are timed, and one
    validation."""
    settings = recipe.train
    on_cpu = settings.device == "cpu" or not torch.accelerator.is_available()
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    assert device is not None  # one is available
    context = DistributedContext("single", device, 0, 1, settings.precision)
    model = build_model(recipe, data).to(device).train()
    optimizers, scaler = build_optimizers(model, settings), torch.amp.GradScaler(device.type, enabled=False)

    def step(number: int) -> None:
        backward(model, data.batches.train_batch(number), context, scaler, settings.accumulation)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step(1)
    times: list[float] = []
    while len(times) < 2 or (sum(times) < _SECONDS and len(times) < _MOST_STEPS):
        times.append(_seconds(lambda: step(2), device))
    model.eval()
    with torch.no_grad(), context.autocast():
        validation = _seconds(lambda: validation_callback(data.batches)(model, 0), device)
    evaluations = -(-settings.steps // (settings.evaluate_every or settings.steps))
    return settings.steps * median(times) + evaluations * validation


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began
