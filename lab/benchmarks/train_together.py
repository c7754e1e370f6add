"""Train the runs of an experiment at once on one GPU, each optimizer step a CUDA graph.

    python lab/benchmarks/train_together.py OUTPUT '[["diff", 0.008, 0], ["softmax", 0.008, 0]]' --text novels

The training loop waits for the loss and the gradient norm of every step, which no graph can; a step here is its
arithmetic without that (`lab/tests/bench/test_train_together.py` compares the two). Runs are named by variant, learning
rate and seed, and written into OUTPUT/runs as `diff-lab reproduce` keeps them and, where the preset does not compile,
finds them; those that are there are left out. Nothing is resumed: a run of the preset "night" takes about 20 seconds of
an H100, one or many (docs/log.md).
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diff_lab.data import TextBatches
from diff_lab.data.batches import IGNORED
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.experiment import section
from diff_lab.experiments.request import DatasetCache, request_experiment
from diff_lab.experiments.run_store import TRAINED, Store, run_key
from diff_lab.files import finite
from diff_lab.measure.standard import LABEL_ACCURACY, VALIDATION_LOSS, LanguageLoss
from diff_lab.results_files import capture_environment, write_json, write_text
from diff_lab.train import Data, Recipe
from diff_lab.train.checkpoint import save_model
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.run_setup import METRICS, MODEL, build_model
from diff_lab.train.step import build_optimizers, learning_rate, loss_of_rows

Batch = dict[str, Tensor]
# The first steps are taken kernel by kernel: the optimizer's state and the choice of kernels are no part of a graph.
EAGER_STEPS = 3


class Run:
    """A model that is trained, with its optimizer, its batches and, once captured, the graph of its step."""

    def __init__(self, recipe: Recipe, data: Data, batches: Batch) -> None:
        self.recipe, self.settings, self.data, self.batches = recipe, recipe.train, data, batches
        device = batches["input_ids"].device
        self.context = DistributedContext("single", device, 0, 1, recipe.train.precision)
        self.model = build_model(recipe, data).to(device).train()
        self.optimizers = build_optimizers(self.model, recipe.train)
        self.rate, self.loss, self.norm = (torch.zeros((), device=device) for _ in range(3))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group |= {"lr": self.rate, "capturable": device.type == "cuda"}
        self.batch = {name: torch.zeros_like(steps[0]) for name, steps in batches.items()}
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.lines: list[dict[str, Any]] = []
        self.diverged: str | None = None  # what was not finite in the first logged step that shows it

    def step(self, number: int) -> None:
        """Enqueue an optimizer step."""
        with self._on_stream():
            for name, rows in self.batch.items():
                rows.copy_(self.batches[name][number - 1])
            self.rate.fill_(learning_rate(number, self.settings))
            if self.graph is not None:
                self.graph.replay()
            else:
                self._zero_grad()
                self._compute()

    def capture(self) -> None:
        """Record the step as a graph; nothing is computed."""
        assert self.stream is not None  # on CUDA alone
        self._zero_grad()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._compute()
        self.graph = graph

    def validate(self, rows: Batch, *, of_text: bool) -> Tensor:
        """Enqueue the summed loss of the validation blocks of text, or of another task the share of right labels."""
        self.model.eval()
        options = {"num_items_in_batch": 1, "use_cache": False, "chunked_loss": True}
        with self._on_stream(), torch.no_grad(), self.context.autocast():
            if of_text:
                score: Tensor = self.model(**rows, **options).loss
            else:
                predicted = self.model(input_ids=rows["input_ids"], use_cache=False).logits[:, :-1].argmax(-1)
                labels = rows["labels"][:, 1:]
                score = (predicted == labels).sum() / (labels != IGNORED).sum()
        self.model.train()
        return score

    def log(self, number: int, validation: dict[str, float] | None) -> None:
        rate = learning_rate(number, self.settings)
        line: dict[str, Any] = {"step": number, "loss": float(self.loss), "learning_rate": rate}
        line["grad_norm"] = float(self.norm)
        if self.diverged is None and not math.isfinite(line["loss"] + line["grad_norm"]):
            self.diverged = f"The loss was {line['loss']} and the gradient norm {line['grad_norm']} at step {number}."
        if validation is not None:
            line |= {"lambdas": self.model.lambdas(), **validation}
        self.lines.append(line)

    def write(self, folder: Path, commit: str | None, seconds: float) -> None:
        """Write the run as the store of `reproduce` keeps it."""
        self.model.eval()
        (folder / "run").mkdir(parents=True, exist_ok=True)
        if self.diverged is None:
            save_model(folder / "run" / MODEL, self.model, self.data.tokenizer)
        lines = (json.dumps(finite(line), allow_nan=False) + "\n" for line in self.lines)
        write_text(folder / "run" / METRICS, "".join(lines))
        outcome = {"commit": commit, "begun_at": commit, "diverged": self.diverged, "seconds": seconds}
        write_json(folder / TRAINED, {**vars(capture_environment(self.loss.device.type)), **outcome})

    def _compute(self) -> None:
        targets = (self.batch["labels"][:, 1:] != IGNORED).sum()
        loss = loss_of_rows(self.model, self.batch, targets, self.context)
        loss.backward()
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.settings.max_grad_norm, norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.loss.copy_(loss.detach())
        self.norm.copy_(norm)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def train(runs: list[Run], steps: int) -> Iterator[int]:
    """Train all runs, one step of each after the other; yields the number of each step that is enqueued."""
    batches, device = runs[0].data.batches, runs[0].loss.device
    text = batches if isinstance(batches, TextBatches) else None
    rows = stacked(batches.validation_batches(), torch.cat, device)
    settings = runs[0].settings
    evaluate_every = settings.evaluate_every or settings.steps
    on_cuda = device.type == "cuda"

    def validation(score: Tensor) -> dict[str, float]:
        if text is None:
            return {LABEL_ACCURACY: float(score)}
        loss = LanguageLoss(float(score), rows["labels"][:, 1:].numel(), text.validation_bytes)
        return {VALIDATION_LOSS: loss.per_token, "validation/bits_per_byte": loss.bits_per_byte}

    for number in range(1, steps + 1):
        if number == EAGER_STEPS + 1 and on_cuda:
            for run in runs:
                run.capture()
        for run in runs:
            run.step(number)
        evaluates = number == settings.steps or number % evaluate_every == 0
        if evaluates or number % settings.log_every == 0:
            scores = [run.validate(rows, of_text=text is not None) if evaluates else None for run in runs]
            if on_cuda:
                torch.cuda.synchronize()
            for run, score in zip(runs, scores, strict=True):
                run.log(number, None if score is None else validation(score))
        yield number


def stacked(batches: Iterable[Batch], join: Callable[[list[Tensor]], Tensor], device: torch.device) -> Batch:
    """The batches as one, on the device."""
    every = list(batches)
    return {name: join([batch[name] for batch in every]).to(device) for name in ("input_ids", "labels")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", type=json.loads, help="a JSON list of [variant, learning rate, seed]")
    parser.add_argument("--experiment", default="language")
    parser.add_argument("--preset", default="night")
    parser.add_argument("--text", action="append", default=[], help="file or folder of text")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # which allocates memory while a graph is captured
    experiment = find_experiment(arguments.experiment)
    preset = request_experiment(experiment, arguments.preset, text=arguments.text).preset
    variants = {variant.name: variant for variant in preset.variants}
    store, commit = Store(arguments.output / "runs"), capture_environment("cpu").commit
    data_of, rows_of, runs = DatasetCache(), dict[int, Batch](), dict[str, Run]()
    labels: dict[str, str] = {}
    for name, rate, seed in arguments.runs:
        if name not in variants:
            parser.error(f"runs name a variant of {', '.join(variants)}, got {name!r}.")
        recipe = preset.variant_recipe(variants[name], *section("train", learning_rate=rate, seed=seed))
        data = data_of.of(recipe)
        key = run_key(recipe, data.batches, None, experiment.logs)
        if store.find(key) is not None:
            print(f"{key} {name} {rate:g} {seed}: is there already")
            continue
        if seed not in rows_of:
            with ThreadPoolExecutor() as pool:
                steps_of = pool.map(data.batches.train_batch, range(1, recipe.train.steps + 1))
                rows_of[seed] = stacked(steps_of, torch.stack, device)
        runs[key] = Run(recipe, data, rows_of[seed])
        labels[key] = f"{name}, learning rate {rate:g}, seed {seed}"
    if not runs:
        return
    steps = next(iter(runs.values())).settings.steps
    begin = time.monotonic()
    for number in train([*runs.values()], steps):
        if number % (steps // 10 or 1) == 0:
            losses = " ".join(f"{run.lines[-1]['loss']:.3f}" for run in runs.values() if run.lines)
            print(f"step {number} of {steps}, {time.monotonic() - begin:.0f} s: {losses}", flush=True)
    seconds = (time.monotonic() - begin) / len(runs)
    for key, run in runs.items():
        run.write(arguments.output / "runs" / key, commit, seconds)
        print(key, labels[key], run.diverged or run.lines[-1])


if __name__ == "__main__":
    main()
