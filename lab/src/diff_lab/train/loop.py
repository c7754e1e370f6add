"""Trains the model of a recipe in a loop that resumes, logs, evaluates, saves and stops."""

import hashlib
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diff_lab.data.batches import Batches
from diff_lab.files import read_metrics
from diff_lab.train import run_setup
from diff_lab.train.checkpoint import (
    STATE,
    Checkpoints,
    RunState,
    checkpoints_by_step,
    collective_directory,
    load_checkpoint,
    read_state,
    save_model,
)
from diff_lab.train.distributed import (
    DistributedContext,
    all_gather_object,
    is_rank0,
    on_rank0,
    plain_connection_errors,
    propagate_errors,
)
from diff_lab.train.plan import flops_per_token, peak_flops
from diff_lab.train.progress import Metrics, Progress, check_trackers
from diff_lab.train.recipe import Recipe
from diff_lab.train.run_setup import Data, build_data, build_model, draw_weights
from diff_lab.train.step import (
    DivergenceError,
    SpikeDetector,
    backward,
    build_optimizers,
    enable_checkpointing,
    learning_rate,
    prefetched,
)

SAME_WISH_SECONDS = 3.0  # a second signal within this time repeats the first one
# (model, step) → numbers to log, by name. The model is in evaluation mode and gradients are off.
Evaluate = Callable[[Any, int], dict[str, float]]


@dataclass(frozen=True)
class TrainedRun:
    """A finished run in `folder`."""

    folder: Path
    model_folder: Path  # the trained model in the folder (`save_pretrained`), with its tokenizer if there is one
    model: Any  # the same model, still on its device, in evaluation mode
    parameters: int
    seconds: float  # spent in training steps, those before an interruption included; no evaluation, no saving
    last: dict[str, Any]  # the last line of `metrics.jsonl`, if there is one


def train(
    recipe: Recipe,
    output_dir: str | Path,
    *,
    resume: run_setup.Resume = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_evaluate: Evaluate | None = None,
    data: Data | None = None,
) -> TrainedRun:
    """Train the model of a recipe.

    Writes into `output_dir`: `recipe.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/step-000100/`, and at the end
    `model/`. If a launcher has started several ranks, all of them call this; rank 0 writes. A resumed run ends with the
    very weights it would have had without the interruption (on one device, with the same number of threads).

    Args:
        output_dir: the folder of the run: new or empty, unless one of the next two says otherwise.
        resume: resume from the newest checkpoint of the run in `output_dir`; "auto" begins one if there is none.
        overwrite: replace the run in `output_dir`.
        progress: shows every step, as :class:`~diff_lab.train.progress.RunProgress` on a console; by default nothing.
        on_evaluate: called every `evaluate_every` steps and after the last one; its results are logged.
        data: the recipe's data, if `build_data(recipe)` has been called already.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: the folder or the input is not right; nothing has been written.
        DivergenceError: the loss or its gradient is not finite, or the loss jumped; the weights are those before.
        TrainingInterrupted: Ctrl-C, SIGTERM or the end of the terminal (SIGHUP, unless it is ignored); the step and its
            evaluation are finished and a checkpoint was saved, after the last step the model as well.
        OSError: the disk is full, or the folder was removed; none of the checkpoints to resume from is complete; or, as
            ConnectionError, another rank has ended, or has hung for `train.timeout_minutes`.
    """
    with open_run(recipe, output_dir, resume=resume, overwrite=overwrite) as run:
        return run.train(data or build_data(recipe), progress, on_evaluate)


@contextmanager
def open_run(
    recipe: Recipe, output_dir: str | Path, *, resume: run_setup.Resume = False, overwrite: bool = False
) -> Iterator["TrainingRun"]:
    """Check as :func:`train` does, before any data is read, and lock the folder for the block. On every rank."""
    folder = Path(output_dir)
    check_trackers(recipe.train.trackers)
    resumes = run_setup.check_run_folder(folder, recipe, resume=resume, overwrite=overwrite)
    settings = recipe.train
    context = DistributedContext.from_env(
        settings.parallel, settings.precision, settings.device, settings.timeout_minutes
    )
    context.check(recipe.data.batch_size, settings.accumulation)
    with plain_connection_errors(settings.timeout_minutes), ExitStack() as lock:
        with propagate_errors():
            if is_rank0():
                lock.enter_context(run_setup.locked(folder))
        yield TrainingRun(recipe, folder, context, all_gather_object(resumes)[0])


class TrainingRun:
    """A run in its folder, which :func:`open_run` has checked and locked. It is trained once.

    With `resumes`, it resumes from the newest checkpoint in the folder.
    """

    def __init__(self, recipe: Recipe, folder: Path, context: DistributedContext, resumes: bool) -> None:
        self.recipe, self.settings = recipe, recipe.train
        self.folder, self.context, self.resumes = folder, context, resumes

    def train(self, data: Data, progress: Progress | None = None, on_evaluate: Evaluate | None = None) -> TrainedRun:
        """Train to the last step and save the model; see :func:`train`."""
        self._start_or_resume(data, progress, on_evaluate)
        files = self.folder / run_setup.METRICS, self.folder / run_setup.TENSORBOARD
        with propagate_errors():
            recipe, trackers = self.recipe.model_dump(mode="json"), self.settings.trackers
            self.metrics = Metrics(*files, self.state.step, trackers, **recipe) if is_rank0() else None
        with self.metrics or nullcontext(), Interrupt() as interrupt:
            self.progress.start(self.settings.steps, f"{self.recipe.name} · {self.recipe.model.attention_type}")
            self.progress.tell(self.context.describe())
            if self.resumes:
                step = f"resumes after step {self.state.step}"
                self.progress.tell(step if self.resumed_from else "no checkpoint: begins at step 1")
            try:
                self.call.train()
                if self.state.unlogged is not None:
                    self._log(self.state.unlogged)
                rows = self.context.rows(self.recipe.data.batch_size)
                steps = self.state.step + 1, self.settings.steps
                for number, batch in prefetched(data.batches.train_batch, rows, *steps):
                    self._log(self._train_step(number, batch))
                    stopping = self.context.any(interrupt.requested)
                    # Steps that are skipped may be those of broken weights, which must not outlive the last good ones.
                    if stopping or (self._is_due(self.settings.checkpoint_every) and not self.detector.bad_steps):
                        if not self.folder.is_dir():
                            raise FileNotFoundError(
                                f"The output folder {str(self.folder)!r} was removed during training."
                            )
                        checkpoint = self._save()
                        if stopping and number < self.settings.steps:
                            raise TrainingInterrupted(
                                f"Stopped after step {number} of {self.settings.steps}; {checkpoint} holds the run. "
                                "The same command with --resume (in Python: resume=True) resumes from there.",
                                interrupt.signal,
                                is_saved=True,
                            )
            finally:
                self.progress.stop()
            stopping = self.context.any(interrupt.requested)
        run = self._finish()
        if stopping:  # nothing is left to do here, but whoever trains several runs must not begin the next
            raise TrainingInterrupted(
                f"Stopped after the last step; {run.model_folder} holds the trained model.",
                interrupt.signal,
                is_saved=True,
            )
        return run

    def _start_or_resume(self, data: Data, progress: Progress | None, on_evaluate: Evaluate | None) -> None:
        settings, context = self.settings, self.context
        self.data, self.on_evaluate = data, on_evaluate
        self.warn = warnings.warn if progress is None else progress.tell
        self.progress = progress if progress is not None and is_rank0() else Progress()
        torch.manual_seed(settings.seed)
        self.checkpoints = Checkpoints(self.folder / run_setup.CHECKPOINTS, settings.keep_checkpoints, self.warn)
        self.resumed_from = self.checkpoints.newest() if self.resumes else None
        model = build_model(
            self.recipe, data, init_from=self.resumed_from is None, without_weights=context.kind == "fsdp"
        )
        if not self.resumes:
            on_rank0(lambda: run_setup.begin_run_folder(self.folder, self.recipe))
        if settings.gradient_checkpointing:
            enable_checkpointing(model)
        # `call` is the module to call in training: the model, or DDP's wrapper of it.
        self.model, self.call = context.parallelize(model, lambda each: draw_weights(each, settings.seed))
        if context.rank:  # each rank drops other attention weights
            torch.manual_seed(settings.seed + (context.rank << 32))
        if settings.compile:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizers = build_optimizers(self.model, settings)
        self.detector = SpikeDetector(settings.max_loss_rise)
        self.state = RunState(data=on_rank0(lambda: _fingerprint(data.batches)))
        if self.resumed_from is not None:
            state = read_state(self.resumed_from)
            if state.data != self.state.data:
                raise ValueError(
                    f"The data is not that of the run in {str(self.folder)!r}; "
                    "choose another output folder, or overwrite (--overwrite, in Python overwrite=True)."
                )
            load_checkpoint(self.resumed_from, self.model, self.optimizers)
            if state.spike_detector is not None:
                self.detector.load_state_dict(state.spike_detector)
            self.state = state
        if is_rank0():
            if self.resumes:  # nothing is refused from here on: the rest is trained with these settings
                run_setup.write_recipe(self.folder, self.recipe)
            run_setup.write_examples(self.folder, data)
        self.tokens, self.seconds_logged = 0, self.state.seconds  # since the last logged step, and until it

    def _train_step(self, number: int, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Change the weights by one batch, unless its loss or gradient goes wrong. Return the step's metrics."""
        started = time.perf_counter()
        rate = learning_rate(number, self.settings)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers):
            group["lr"] = rate
        loss = backward(self.call, batch, self.context, self.settings.accumulation)
        total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or math.inf)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        wrong = self.detector.check(loss, norm)
        if wrong is not None:
            self._report(f"At step {number} {wrong}: loss {loss:.4g}, gradient norm {norm:.4g}.")
        for optimizer in self.optimizers:
            if wrong is None:
                optimizer.step()
            optimizer.zero_grad()
        self.state.step = number
        self.state.seconds += time.perf_counter() - started
        self.tokens += batch["input_ids"].numel() * self.context.count
        speed = self.tokens / (self.state.seconds - self.seconds_logged)
        line = {"step": number, "loss": loss, "learning_rate": rate, "grad_norm": norm, "tokens_per_second": speed}
        return line if wrong is None else line | {"skipped": wrong}

    def _report(self, bad_step: str) -> None:
        """Raise DivergenceError unless a bad step may be skipped."""
        settings = self.settings
        if settings.on_divergence == "stop" or not self.detector.may_skip:
            checkpoint = self.checkpoints.last
            resumable = f"The newest checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint yet"
            raise DivergenceError(
                f"{bad_step} transformers.debug_utils.DebugUnderflowOverflow names the first layer that is not finite. "
                f"{resumable}. A lower train.learning_rate (now {settings.learning_rate}) or a longer warm-up "
                "usually helps, in a run of its own, which may start from a checkpoint (model.init_from). This run "
                "resumes with --resume and train.on_divergence=skip, which skips such steps, or another "
                "train.max_loss_rise."
            )
        if is_rank0():
            self.warn(f"The step is skipped. {bad_step}")

    def _log(self, line: dict[str, Any]) -> None:
        """Show the progress, and log the step if it is due, with an evaluation if one is."""
        settings, number, speed = self.settings, line["step"], line["tokens_per_second"]
        evaluates = self.on_evaluate is not None and self._is_due(settings.evaluate_every)
        self.state.unlogged = line
        evaluated = self._evaluate(number) if evaluates else {}
        self.state.unlogged = None
        self.progress.update(number, line["loss"], speed)
        if not (evaluates or "skipped" in line or self._is_due(settings.log_every)):
            return
        line |= {"seconds": self.state.seconds, "lambdas": self.model.lambdas()}
        # The share of the devices' peak that the model's own arithmetic takes; None where no peak is known.
        device = self.context.device
        peak = peak_flops(device, settings.precision)
        flops = speed * flops_per_token(self.model.config, self.recipe.data.length) / self.context.count
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        line |= {"mfu": None if peak is None else flops / peak, "memory": memory, **evaluated}
        if self.metrics is not None:
            self.metrics.log(line)
        self.tokens, self.seconds_logged = 0, self.state.seconds

    def _is_due(self, every: int | None) -> bool:
        """Return whether work of every so many steps, and after the last one, is due now."""
        return self.state.step == self.settings.steps or (every is not None and self.state.step % every == 0)

    def _evaluate(self, number: int) -> dict[str, float]:
        """Evaluate. Training draws the same random numbers afterwards, with an evaluation and without."""
        assert self.on_evaluate is not None  # the caller's own check
        self.model.eval()
        devices = [self.context.device] if self.context.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), self.context.autocast():
                results = self.on_evaluate(self.model, number)
        except Exception:
            if self.context.count == 1:  # of several ranks, the others may be elsewhere in the run
                self._save()
            raise
        self.model.train()
        self.progress.evaluated(number, results)
        return results

    def _save(self) -> Path:
        state = replace(self.state, spike_detector=self.detector.state_dict())
        return self.checkpoints.save(state, self.model, self.optimizers, self.data.tokenizer)

    def _finish(self) -> TrainedRun:
        self.model.eval()
        folder = self.folder / run_setup.MODEL
        with collective_directory(folder, intact=self.checkpoints.intact()) as target:
            save_model(target, self.model, self.data.tokenizer)
        return TrainedRun(
            folder=self.folder,
            model_folder=folder,
            model=self.model,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            seconds=self.state.seconds,
            last=(read_metrics(self.folder / run_setup.METRICS) or [{}])[-1],
        )


def _fingerprint(batches: Batches) -> str:
    """Return a number for the data: of all text, and of the first batch, which other settings or seeds change."""
    first = batches.train_batch(1)["input_ids"].numpy().tobytes()
    return hashlib.sha256(first + batches.source.encode()).hexdigest()


def refuse_other_data(model: Path, batches: Batches) -> None:
    """Raise ValueError if the data are not those that a model was trained on, by its own or its run's checkpoints."""
    checkpoints = checkpoints_by_step(model.parent / run_setup.CHECKPOINTS).values()
    trained = [read_state(path).data for path in (model, *checkpoints) if (path / STATE).is_file()]
    if trained and trained[-1] != _fingerprint(batches):
        raise ValueError(
            f"The data of the run have changed since {str(model)!r} was trained, so it may know what is held out now; "
            "put them back, or name a text that it has not seen by --text."
        )


class TrainingInterrupted(KeyboardInterrupt):
    """One of the :func:`stop_signals` stopped a run; the message names the checkpoint and how to resume."""

    def __init__(self, message: str, signal: int | None = None, *, is_saved: bool = False) -> None:
        super().__init__(message)
        self.signal = signal  # the number of the one that asked for it; None where another process got it
        self.is_saved = is_saved  # whether a checkpoint or the model holds all that was done


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run with a checkpoint: Ctrl-C, SIGTERM, and SIGHUP unless nohup ignores it."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    return numbers


class Interrupt:
    """Whether the run is to stop: one of the :func:`stop_signals` (`signal`) asked for it, or its launcher is gone.

    In the block of this context manager the step in progress is finished; a second signal ends it at once. A second one
    within `SAME_WISH_SECONDS` repeats the first: torchrun passes on what all processes of a job got at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first = math.inf  # when it came
        self._handlers: dict[int, Any] = {}  # those before the block
        # torchrun's processes end with it, unless it was killed: then nobody would stop them.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether the run is to stop after this step."""
        return self.signal is not None or self._launcher not in (None, os.getppid())

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._record) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, _: Any) -> None:
        if self.signal is None:
            self._first, self.signal = time.monotonic(), number
        elif time.monotonic() - self._first > SAME_WISH_SECONDS:
            self.__exit__()
            os.kill(os.getpid(), number)
