"""What `diff_lab.train.train` costs beside a bare loop over the same model, batches and optimizer.

    python lab/benchmarks/training_loop.py                                       # CPU: minutes
    python lab/benchmarks/training_loop.py --device cuda --compile --precision bf16 --batch-size 16

Both train the same model from the same weights in one process, in turns of `--block` steps: whenever `train` reports
the end of a block, the bare loop makes the same steps before `train` goes on. So a drift of the machine meets both
alike. Every block of `train` holds a logged step; the layer statistics, which come once in a hundred steps, are timed
by themselves and their share added. The bare loop has its batches ready, while `train` makes them; the time that one
takes is reported, too. The losses of both must agree, or nothing is written.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diff_lab.bench.timing import spread
from diff_lab.data.batches import flattened
from diff_lab.record import Result
from diff_lab.results_files import capture_results, write_json
from diff_lab.train import Recipe, build_data, build_model, parse_recipe, train
from diff_lab.train.layer_statistics import measure_layers
from diff_lab.train.progress import Progress
from diff_lab.train.step import build_optimizers

HERE = Path(__file__).parent
WARM_UP = 3  # steps of either that are not timed: kernels are built, memory is found
LIMIT = 0.03  # of the overhead
# How far apart the losses of a step may be, relatively: rounding that grows from step to step.
AGREEMENT = {"no": 1e-3, "bf16": 3e-2}

Batch = dict[str, Tensor | int]


class Bare:
    """The least that trains: forward, backward, clip, step."""

    def __init__(self, model: Any, recipe: Recipe, batches: list[Batch], device: torch.device) -> None:
        self.model, self.settings, self.batches, self.device = model.to(device).train(), recipe.train, batches, device
        if recipe.train.compile:
            for layer in self.model.model.layers:
                layer.compile()
        self.optimizers = build_optimizers(self.model, recipe.train)
        self.losses: list[Tensor] = []

    def run(self, steps: int) -> float:
        """Seconds of so many steps."""
        wait_for(self.device)
        start = time.perf_counter()
        for batch in self.batches[len(self.losses) :][:steps]:
            inputs = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
            with autocast(self.device, self.settings.precision):
                loss = self.model(**inputs, use_cache=False, chunked_loss=True).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm or math.inf)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(loss.detach())
        wait_for(self.device)
        return time.perf_counter() - start


class Turns(Progress):
    """Is told about `train`'s steps, and lets the bare loop have its turn after each block of them.

    `seconds` are those of each block of either, by "train" and "bare".
    """

    def __init__(self, bare: Bare, block: int) -> None:
        self.bare, self.block = bare, block
        self.losses: list[float] = []
        self.seconds: dict[str, list[float]] = {"train": [], "bare": []}
        self._began = math.nan

    def update(self, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        self.losses.append(loss)
        timed = step - WARM_UP
        if timed < 0 or timed % self.block:
            return
        wait_for(self.bare.device)
        now = time.perf_counter()
        if timed:
            self.seconds["train"].append(now - self._began)
            self.seconds["bare"].append(self.bare.run(self.block))
        else:
            self.bare.run(WARM_UP)
        self._began = time.perf_counter()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Bytes of text, sizes as in the recipe "small", and a constant rate: the bare loop needs no schedule."""
    return parse_recipe(
        {
            "name": "training-loop",
            "model": {
                "attention_type": arguments.attention,
                "hidden_size": arguments.hidden,
                "intermediate_size": 8 * arguments.hidden // 3,
                "num_hidden_layers": arguments.layers,
                "head_dim": 32,
                "vocab_size": arguments.vocabulary,
            },
            "data": {
                "kind": "text",
                "paths": arguments.text,
                "length": arguments.length,
                "batch_size": arguments.batch_size,
            },
            "train": {
                "steps": WARM_UP + arguments.block * arguments.rounds,
                "learning_rate": 1e-4,
                "schedule": "constant",
                "precision": arguments.precision,
                "device": "cpu" if arguments.device == "cpu" else "auto",
                "compile": arguments.compile,
            },
        }
    )


def median_seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    samples = []
    for _ in range(times):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def check_agreement(losses: list[float], bare_losses: list[float], tolerance: float) -> None:
    """Raises ValueError where the two loops have not done the same work."""
    for step, (loss, bare) in enumerate(zip(losses, bare_losses, strict=True), start=1):
        if not abs(loss - bare) <= tolerance * abs(bare):
            raise ValueError(f"The loops part: at step {step} the loss of train() is {loss}, of the bare loop {bare}.")


def measure(recipe: Recipe, block: int, device: torch.device) -> list[Result]:
    """Run both loops. The records are their times, and the overhead of `train` as shares of the bare loop's step."""
    data = build_data(recipe)
    steps, tokens = recipe.train.steps, recipe.data.batch_size * recipe.data.length
    started = time.perf_counter()
    batches = [data.batches.train_batch(step) for step in range(1, steps + 1)]
    making = (time.perf_counter() - started) / steps
    ready = [flattened(batch) for batch in batches]
    turns = Turns(Bare(build_model(recipe, data), recipe, ready, device), block)
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "run", progress=turns, data=data)
    check_agreement(turns.losses, [float(loss) for loss in turns.bare.losses], AGREEMENT[recipe.train.precision])

    first_row = flattened({name: tensor[:1] for name, tensor in batches[0].items()})
    one = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in first_row.items()}
    with autocast(device, recipe.train.precision):
        statistics_seconds = median_seconds(lambda: measure_layers(run.model, one), device, 3)
    each = {variant: [seconds / block for seconds in turns.seconds[variant]] for variant in turns.seconds}
    step = {variant: statistics.median(values) for variant, values in each.items()}
    ratios = spread([ours / bare for ours, bare in zip(each["train"], each["bare"], strict=True)])
    every = recipe.train.inspect_every
    statistics_share = statistics_seconds / (every or math.inf) / step["bare"]
    records = []
    for variant, seconds in step.items():
        timed: dict[str, Any] = {"variant": variant, "n": len(each[variant]), "method": "median of the blocks"}
        records.append(Result(name="step", value=1e3 * seconds, unit="ms", **timed))
        records.append(Result(name="tokens per second", value=tokens / seconds, unit="1/s", **timed))
    all_steps = sum(turns.seconds["train"]) / sum(turns.seconds["bare"]) - 1
    shares = {
        "overhead of the steps": (ratios.median - 1, "median over the blocks, between their quartiles"),
        "share of the layer statistics": (
            statistics_share,
            f"{1e3 * statistics_seconds:.1f} ms, once in {every} steps",
        ),
        "overhead": (ratios.median - 1 + statistics_share, "the sum of both"),
        "overhead of all steps": (all_steps, "total over total, with the layer statistics that fell into them"),
        "share of making a batch": (making / step["bare"], f"{1e3 * making:.2f} ms, in a thread beside the step"),
    }
    quartiles = (ratios.quartiles[0] - 1, ratios.quartiles[1] - 1)
    for name, (value, method) in shares.items():
        interval = quartiles if name == "overhead of the steps" else None
        fields: dict[str, Any] = {"interval": interval, "better": "lower", "method": method}
        records.append(Result(name=name, variant="train", value=value, **fields))
    return records


def verdict(records: list[Result]) -> str:
    """Whether the overhead keeps the limit. Blocks that differ by more than twice the limit are a busy machine's."""
    shares = {record.name: record for record in records if record.variant == "train"}
    low, high = shares["overhead of the steps"].interval or (math.nan, math.nan)
    if not high - low <= 2 * LIMIT:
        return "undecided, as the blocks differ by more: measure again on an idle machine"
    return "held" if shares["overhead"].value <= LIMIT else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--attention", default="diff", choices=("diff", "diff_v2", "softmax"))
    parser.add_argument("--text", help="a file or a folder of text; Python's standard library unless given")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--precision", default="no", choices=tuple(AGREEMENT))
    parser.add_argument("--compile", action="store_true", help="compile each layer, of both")
    parser.add_argument(
        "--block", type=int, default=10, help="steps of a turn; the default has one logged step in each"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of either")
    parser.add_argument("--output", type=Path, help="training_loop.json beside this file, or training_loop-cuda.json")
    arguments = parser.parse_args()
    recipe, device = recipe_of(arguments), torch.device(arguments.device)
    records = measure(recipe, arguments.block, device)
    settings = {**recipe.model_dump(), "block": arguments.block, "rounds": arguments.rounds}
    document = capture_results("training loop", settings, records, arguments.device)
    for record in records:
        value = f"{100 * record.value:8.2f} %" if not record.unit else f"{record.value:8,.1f} {record.unit}"
        between = f", {100 * record.interval[0]:.2f} to {100 * record.interval[1]:.2f} %" if record.interval else ""
        print(f"{record.name:26} {record.variant:6} {value}{between}  {record.method}")
    print(f"limit: at most {100 * LIMIT:.0f} %: {verdict(records)}")
    sizes = ", ".join(f"{name} {vars(arguments)[name]}" for name in ("hidden", "layers", "length", "batch_size"))
    versions = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    print(f"{document.device}; {sizes}, precision {arguments.precision}, compile {arguments.compile}; {versions}")
    print(document.command)
    suffix = "" if arguments.device == "cpu" else f"-{arguments.device}"
    path = write_json(arguments.output or HERE / f"training_loop{suffix}.json", document, indent=1)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
