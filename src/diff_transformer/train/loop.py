"""The training loop."""

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from diff_transformer.data.batches import Batches
from diff_transformer.train.checkpoint import (
    Checkpoints,
    RunState,
    load_checkpoint,
    save_model,
    weights_of,
    written_whole,
)
from diff_transformer.train.distributed import Processes
from diff_transformer.train.divergence import diagnose, stop_or_leave_out
from diff_transformer.train.flops import flops_per_token
from diff_transformer.train.hardware import peak_flops
from diff_transformer.train.loss_watch import Watch
from diff_transformer.train.metrics import Metrics, peak_memory, read_metrics
from diff_transformer.train.optimizer import build_optimizers, learning_rate
from diff_transformer.train.progress import Progress, Silent, TrainingInterrupted, catch_interrupt
from diff_transformer.train.recipe import Recipe
from diff_transformer.train.run_folder import (
    CHECKPOINTS,
    METRICS,
    MODEL,
    TENSORBOARD,
    Resume,
    begin_run_folder,
    check_run_folder,
    is_resumed,
    locked,
    require_run_folder,
)
from diff_transformer.train.setup import Data, build_data, build_model, draw_weights
from diff_transformer.train.standstill import TimeLimit, plain_connection_errors
from diff_transformer.train.step import backward, inspect_batch, prefetched
from diff_transformer.train.tensor_files import bytes_of
from diff_transformer.train.together import gathered, together

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
        last: the last line of `metrics.jsonl`, if there is one.
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
    resume: Resume = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_evaluate: Evaluate | None = None,
    data: Data | None = None,
) -> TrainedRun:
    """Train the model of a recipe.

    Writes into `output_dir`: `recipe.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-000100/`, at the end
    `model/`, and `divergence.json` where a step went wrong. Where a launcher has started several processes, all of them
    call this; the first one writes. A resumed run ends with the very weights it would have had without the
    interruption (on one device, with the same number of threads).

    Args:
        recipe: what to train.
        output_dir: the folder of the run: new or empty, unless one of the next two says otherwise.
        resume: go on from the newest checkpoint of the run in `output_dir`; "auto" begins one where there is none.
        overwrite: replace the run in `output_dir`.
        progress: is told about every step.
        on_evaluate: called every `evaluate_every` steps and after the last one; what it returns is logged.
        data: the recipe's data, if `build_data(recipe)` has been called already.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: the folder or the input is not right; nothing has been written.
        DivergenceError: the loss or its gradient is not finite, or the loss jumped; the weights are those before.
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
        OSError: the disk is full, or the folder was removed; none of the checkpoints to resume from is whole; or, as
            ConnectionError, another process has ended. One that hangs ends this process with a sentence on stderr.
    """
    folder = Path(output_dir)
    check_run_folder(folder, recipe, resume=resume, overwrite=overwrite)
    processes = Processes.of(recipe.train)
    processes.check(recipe)
    data = data or build_data(recipe)
    with plain_connection_errors(recipe.train.timeout_minutes), ExitStack() as held:
        going_on = gathered(is_resumed(folder, resume))[0]
        with together():
            if processes.is_first:
                held.enter_context(locked(folder))
        return _train(recipe, folder, processes, data, going_on, progress, on_evaluate)


def _train(
    recipe: Recipe,
    folder: Path,
    processes: Processes,
    data: Data,
    resume: bool,
    progress: Progress | None,
    on_evaluate: Evaluate | None,
) -> TrainedRun:
    settings = recipe.train
    warn = warnings.warn if progress is None else progress.tell
    progress = progress if progress is not None and processes.is_first else Silent()
    set_seed(settings.seed)
    checkpoints = Checkpoints(folder / CHECKPOINTS, settings.keep_checkpoints, warn)
    newest = checkpoints.newest() if resume else None
    model = build_model(recipe, data, start=newest is None, without_weights=processes.kind == "fsdp")
    if not resume and processes.is_first:
        begin_run_folder(folder, recipe)
    processes.wait()

    if settings.gradient_checkpointing:
        # transformers renamed it within version 5; the old name warns where the new one exists.
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    model, call = processes.spread(model, folder, lambda model: draw_weights(model, settings.seed))
    if settings.compile:
        for layer in model.model.layers:
            layer.compile()
    optimizers = build_optimizers(model, settings)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=settings.precision == "fp16")

    watch = Watch(settings.max_loss_rise, overflow_is_normal=settings.precision == "fp16")
    state = RunState(data=_fingerprint(data.batches))
    if newest is not None:
        state = _restore(newest, model, optimizers, scaler, watch, state.data)

    limit = TimeLimit(
        settings.timeout_minutes,
        lambda: (
            f"The run has stood still after step {state.step} of {settings.steps} for longer than "
            f"train.timeout_minutes={settings.timeout_minutes:g}: this process or another one hangs; "
            f"{checkpoints.intact()}; the same command with --resume goes on."
        ),
    )
    limited = limit.running() if processes.count > 1 else nullcontext()
    with _records(folder, state.step, processes) as metrics, catch_interrupt() as interrupt, limited:
        progress.start(settings.steps, f"{recipe.name} · {recipe.model.attention_type}")
        progress.tell(processes.describe(model, call))
        if resume:
            progress.tell(f"goes on after step {state.step}" if newest else "no checkpoint: begins at step 1")
        fastest = _fastest(model, recipe, processes)
        try:
            call.train()
            tokens, since = 0, state.seconds  # since the last logged step
            layers: dict[str, list[float]] = {}  # what was found when they were last inspected
            for step, batch in prefetched(data.batches.train_batch, state.step + 1, settings.steps):
                limit.begin()
                started = time.perf_counter()
                rate = learning_rate(step, settings)
                for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
                    group["lr"] = rate
                loss = backward(call, batch, processes, scaler, settings.accumulation)
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                norm = processes.clip(model.parameters(), settings.max_grad_norm)
                fault = watch.fault(loss, norm)
                if fault is not None:
                    divergence = diagnose(
                        model, batch, processes, fault, step=step, accumulation=settings.accumulation, before=layers
                    )
                    stop_or_leave_out(divergence, settings, watch, folder, checkpoints.last, processes)
                    if processes.is_first:
                        warn(f"The step is left out. {divergence}")
                for optimizer in optimizers:
                    # One optimizer's overflow, which is normal in fp16, is all optimizers'.
                    if fault is None and math.isfinite(norm):
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
                inspecting = settings.inspect_every is not None and (
                    step == 1 or last or _due(step, settings.inspect_every)
                )
                if last or evaluating or inspecting or fault is not None or _due(step, settings.log_every):
                    line: dict[str, Any] = {"step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm}
                    line |= {"tokens_per_second": speed, "seconds": state.seconds, "lambdas": model.lambdas()}
                    line |= {"mfu": speed / fastest if fastest else None, "memory": peak_memory(processes.device)}
                    if fault is not None:
                        line["left_out"] = fault.what
                    if inspecting:
                        layers = inspect_batch(model, batch, processes)
                        line |= layers
                    if on_evaluate is not None and evaluating:
                        limit.end()  # an evaluation may take as long as it likes
                        try:
                            line |= _evaluate(model, step, on_evaluate, processes)
                        except Exception:
                            if processes.count == 1:  # of several, the others may be at another place
                                checkpoints.save(_with(state, watch, scaler), model, optimizers, data.tokenizer)
                            raise
                        limit.begin()
                    require_run_folder(folder)
                    if metrics is not None:
                        metrics.log(line)
                    tokens, since = 0, state.seconds

                stopping = processes.any(interrupt.requested)
                limit.end()
                if last or stopping or _due(step, settings.checkpoint_every):
                    require_run_folder(folder)
                    checkpoint = checkpoints.save(_with(state, watch, scaler), model, optimizers, data.tokenizer)
                    if stopping and not last:
                        raise TrainingInterrupted(
                            f"Stopped after step {step} of {settings.steps}; {checkpoint} holds the run. "
                            "The same command with --resume (in Python: resume=True) goes on from there.",
                            interrupt.signal,
                        )
        finally:
            progress.stop()

    model.eval()
    room = bytes_of(weights_of(model).values())
    with written_whole(folder / MODEL, room=room, intact=checkpoints.intact()) as target:
        save_model(target, model, data.tokenizer)
    processes.wait()
    return TrainedRun(
        folder=folder,
        model_folder=folder / MODEL,
        model=model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=state.seconds,
        last=(read_metrics(folder / METRICS) or [{}])[-1],
    )


def _records(folder: Path, step: int, processes: Processes) -> AbstractContextManager[Metrics | None]:
    return Metrics(folder / METRICS, folder / TENSORBOARD, step) if processes.is_first else nullcontext()


def _fingerprint(batches: Batches) -> str:
    """A number for the data: of all text, and of the first batch, which other settings or another seed change."""
    return hashlib.sha256(batches.train_batch(1)["input_ids"].numpy().tobytes() + batches.source.encode()).hexdigest()


def _restore(
    checkpoint: Path,
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    watch: Watch,
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
    if state.watch is not None:
        watch.load_state_dict(state.watch)
    return state


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _with(state: RunState, watch: Watch, scaler: torch.amp.GradScaler) -> RunState:
    """The state of a run, with what its parts remember."""
    return replace(state, watch=watch.state_dict(), scaler=scaler.state_dict() if scaler.is_enabled() else None)


def _evaluate(model: Any, step: int, on_evaluate: Evaluate, processes: Processes) -> dict[str, float]:
    model.eval()
    with torch.no_grad(), processes.autocast():
        results = on_evaluate(model, step)
    model.train()
    return results


def _fastest(model: Any, recipe: Recipe, processes: Processes) -> float | None:
    """Tokens per second at which the model's own arithmetic would fill all devices; None where that is not known."""
    peak = peak_flops(processes.device, recipe.train.precision)
    return None if peak is None else processes.count * peak / flops_per_token(model.config, recipe.data.length)
