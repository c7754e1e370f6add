"""Times a few steps of a training, to say before it how long it will take."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from diff_lab.experiments.run_store import training_device
from diff_lab.measure.standard import validation_callback
from diff_lab.train import Data, Recipe, build_model
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.step import backward, build_optimizers

# Steps are timed for about so long, after the first, which takes longer.
_SECONDS, _MOST_STEPS = 1.0, 20


def seconds_of_step(recipe: Recipe, data: Data, threads: int | None = None) -> float:
    """About how many seconds a step of a training takes on this machine, with its share of the validations: a few steps
    are timed, and one validation. A training has so many threads, by default all that torch uses.
    """
    settings = recipe.train
    device = training_device(recipe)
    context = DistributedContext("single", device, 0, 1, settings.precision)
    with _threads(threads):
        model = build_model(recipe, data).to(device).train()
        optimizers, scaler = build_optimizers(model, settings), torch.amp.GradScaler(device.type, enabled=False)

        def step() -> None:
            backward(model, data.batches.train_batch(1), context, scaler, settings.accumulation)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        step()
        times: list[float] = []
        while len(times) < 2 or (sum(times) < _SECONDS and len(times) < _MOST_STEPS):
            times.append(_seconds(step, device))
        model.eval()
        with torch.no_grad(), context.autocast():
            validation = _seconds(lambda: validation_callback(data.batches)(model, 0), device)
    validations = -(-settings.steps // (settings.evaluate_every or settings.steps))
    return median(times) + validation * validations / settings.steps


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began
