"""The training loop."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from diff_transformer.data.batches import Batches
from diff_transformer.data.packing import IGNORED
from diff_transformer.train.checkpoint import Checkpoints, RunState, load_checkpoint, save_model, written_whole
from diff_transformer.train.distributed import Processes
from diff_transformer.train.metrics import Metrics, read_metrics
from diff_transformer.train.optimizer import build_optimizers, learning_rate
from diff_transformer.train.progress import NonFiniteLossError, Progress, Silent, TrainingInterrupted, catch_interrupt
from diff_transformer.train.recipe import Recipe, TrainRecipe
from diff_transformer.train.run_folder import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    TENSORBOARD,
    begin_run_folder,
    check_run_folder,
)
from diff_transformer.train.setup import Data, build_data, build_model

# (model, step) → numbers to log, by name. The model is in evaluation mode and gradients are off.
Evaluate = Callable[[Any, int], dict[str, float]]


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Attributes:
        folder: the run's folder.
        model_folder: the trained model in it (`save_pretrained`), with its tokenizer if there is one.
        model: the same model, still on its device, in evaluation mode.
        parameters: how many it has.
        seconds: time spent in training steps, those before an interruption included; no evaluation, no saving.
        last: the last line of `metrics.jsonl`.
    """

    folder: Path
    model_folder: Path
    model: Any
    parameters: int
    seconds: float
    last: dict[str, Any]


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_evaluate: Evaluate | None = None,
    data: Data | None = None,
) -> TrainedRun:
    """Train the model of a recipe.

    Writes into `output_dir`: `recipe.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-000100/` and, at the
    end, `model/`. A resumed run ends with the very weights it would have had without the interruption (on one device,
    with the same number of threads).

    Args:
        recipe: what to train.
        output_dir: the folder of the run: new or empty, unless one of the next two says otherwise.
        resume: go on from the newest checkpoint of the run in `output_dir`.
        overwrite: replace the run in `output_dir`.
        progress: is told about every step.
        on_evaluate: called every `evaluate_every` steps and after the last one; what it returns is logged.
        data: the recipe's data, if `build_data(recipe)` has been called already.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: the folder or the input is not right; nothing has been written.
        NonFiniteLossError: the loss or gradient stopped being finite.
        TrainingInterrupted: Ctrl-C; a checkpoint was saved.
    """
    folder, settings = Path(output_dir), recipe.train
    check_run_folder(folder, recipe, resume=resume, overwrite=overwrite)
    processes = Processes.of(settings)
    data = data or build_data(recipe)
    set_seed(settings.seed)
    model = build_model(recipe, data)
    processes.check(model.config, recipe.data.batch_size, settings.accumulation)
    progress = progress if progress is not None and processes.is_first else Silent()
    processes.wait()  # all have looked at the folder before one of them changes it
    if not resume and processes.is_first:
        begin_run_folder(folder, recipe)
    processes.wait()

    if settings.gradient_checkpointing:
        # transformers renamed it within version 5; the old name warns where the new one exists.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    model, call = processes.spread(model, folder)
    if settings.compile:
        for layer in model.model.layers:
            layer.compile()
    optimizers = build_optimizers(model, settings)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=settings.precision == "fp16")

    checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep_checkpoints)
    state = RunState(data=_fingerprint(data.batches))
    if resume and (newest := checkpoints.newest()):
        state = _restore(newest, model, optimizers, scaler, state.data)

    with _records(folder, state.step, processes) as metrics, catch_interrupt() as interrupt:
        progress.start(settings.steps, f"{recipe.name} · {recipe.model.attention_type}")
        progress.tell(processes.describe(model, call))
        try:
            call.train()
            tokens, since = 0, state.seconds  # since the last logged step
            for step, batch in prefetched(data.batches.train_batch, state.step + 1, settings.steps):
                started = time.perf_counter()
                rate = learning_rate(step, settings)
                for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
                    group["lr"] = rate
                loss = _backward(call, batch, processes, scaler, settings.accumulation)
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                norm = processes.clip(model.parameters(), settings.max_grad_norm)
                _require_finite(step, loss, norm, settings, checkpoints.newest())
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
                state.step = step
                state.seconds += time.perf_counter() - started
                tokens += batch["input_ids"].numel()
                speed = tokens / (state.seconds - since)
                progress.update(step, loss, speed)

                last = step == settings.steps
                evaluating = on_evaluate is not None and (last or _due(step, settings.evaluate_every))
                if last or evaluating or _due(step, settings.log_every):
                    line = {"step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
                    line |= {"tokens_per_second": speed, "lambdas": model.lambdas()}
                    if on_evaluate is not None and evaluating:
                        line |= _evaluate(model, step, on_evaluate, processes)
                    if metrics is not None:
                        metrics.log(line)
                    tokens, since = 0, state.seconds

                stopping = processes.any(interrupt.requested)
                if last or stopping or _due(step, settings.checkpoint_every):
                    state.scaler = scaler.state_dict() if scaler.is_enabled() else None
                    checkpoint = checkpoints.save(state, model, optimizers, data.tokenizer)
                    if stopping and not last:
                        raise TrainingInterrupted(
                            f"Stopped after step {step} of {settings.steps}; {checkpoint} holds the run. "
                            "The same command with --resume (in Python: resume=True) goes on from there.",
                            interrupt.signal,
                        )
        finally:
            progress.stop()

    model.eval()
    with written_whole(folder / MODEL) as target:
        save_model(target, model, data.tokenizer)
    processes.wait()
    return TrainedRun(
        folder=folder,
        model_folder=folder / MODEL,
        model=model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=state.seconds,
        last=read_metrics(folder / METRICS)[-1],
    )


def prefetched(
    batch_of: Callable[[int], dict[str, Tensor]], first: int, last: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The steps `first` … `last` with their batches; the next one is made by a thread while one is worked on."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(batch_of, first)
        for step in range(first, last + 1):
            batch = coming.result()
            if step < last:
                coming = thread.submit(batch_of, step + 1)
            yield step, batch


def _records(folder: Path, step: int, processes: Processes) -> AbstractContextManager[Metrics | None]:
    return Metrics(folder / METRICS, folder / TENSORBOARD, step) if processes.is_first else nullcontext()


def _fingerprint(batches: Batches) -> str:
    """A number for the data: other text, another tokenizer or another seed give another first batch."""
    return hashlib.sha256(batches.train_batch(1)["input_ids"].numpy().tobytes()).hexdigest()


def _restore(
    checkpoint: Path,
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    fingerprint: str,
) -> RunState:
    state = load_checkpoint(checkpoint, model, optimizers)
    if state.data != fingerprint:
        raise ValueError(
            f"The data is not what the run in {str(checkpoint.parents[1])!r} was started on; "
            "choose another output folder, or overwrite (--overwrite, in Python overwrite=True)."
        )
    if state.scaler is not None:
        scaler.load_state_dict(state.scaler)
    return state


def _backward(
    call: nn.Module, batch: dict[str, Tensor], processes: Processes, scaler: torch.amp.GradScaler, parts: int
) -> float:
    """Gradients of one step's loss: the mean over all its targets, however they are spread over parts and processes."""
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    # What processes exchange is averaged, so each counts its own part as many times as there are of them.
    items = targets / processes.shares
    total = torch.zeros((), device=processes.device)
    own = processes.rows(batch)
    for part in range(parts):
        piece = {name: tensor.chunk(parts)[part].to(processes.device) for name, tensor in own.items()}
        with processes.no_gradient_exchange(call, part < parts - 1), processes.autocast():
            loss = call(**piece, num_items_in_batch=items, use_cache=False).loss
            scaler.scale(loss).backward()
        total += loss.detach()
    return float(processes.sum(total / processes.shares))


def _require_finite(step: int, loss: float, norm: float, settings: TrainRecipe, checkpoint: Path | None) -> None:
    # In fp16 a gradient that overflows is part of the game: the scaler skips the step and scales less.
    if math.isfinite(loss) and (math.isfinite(norm) or settings.precision == "fp16"):
        return
    what = f"the gradient norm became {norm}" if math.isfinite(loss) else f"the loss became {loss}"
    where = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    raise NonFiniteLossError(
        f"At step {step} {what}; {where}. A lower train.learning_rate (now {settings.learning_rate}) "
        "or a longer warm-up usually helps."
    )


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _evaluate(model: Any, step: int, on_evaluate: Evaluate, processes: Processes) -> dict[str, float]:
    model.eval()
    with torch.no_grad(), processes.autocast():
        results = on_evaluate(model, step)
    model.train()
    return results
