"""The memory that `diff-lab plan` says, beside what training takes.

    python lab/benchmarks/plan_memory.py                  # CPU: some minutes
    python lab/benchmarks/plan_memory.py --device cuda

Each run trains a small recipe for a few steps in a process of its own. First it trains a tiny model of the same kind,
so that what the first run loads and starts is there; the memory in use then is the base, and the peak above it, until
the second step is done, is compared with the plan. On the CPU that is the process' resident
memory, with glibc told to give every block of 64 KiB or more back to the system as soon as it is free. A second run
leaves glibc as it is: it keeps blocks of up to 32 MiB, and the gaps between them come on top of what a plan can know
(the column "kept"; it is not compared). On CUDA it is what torch has allocated.
"""

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from diff_lab.bench.peak_memory import MIB, Meter, unavailable_reason
from diff_lab.results_files import capture_environment
from diff_lab.train import Recipe, parse_recipe, train
from diff_lab.train.plan import Plan
from diff_lab.train.progress import Progress

HERE = Path(__file__).parent
LIMIT = 0.15  # of the difference between plan and peak
STEPS = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}

MODEL = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 8192}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32, "num_key_value_heads": 2}
# What differs from the first: a deeper stack whose layers are computed again; and parts in half precision, tied.
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {"data": {"batch_size": 2}},
    "checkpointing": {
        "model": {"num_hidden_layers": 16, "intermediate_size": 2048},
        "data": {"batch_size": 4},
        "train": {"gradient_checkpointing": True},
    },
    "accumulation, bf16": {
        "model": {"vocab_size": 32768, "tie_word_embeddings": True, "num_key_value_heads": 4},
        "data": {"batch_size": 8},
        "train": {"accumulation": 4, "precision": "bf16"},
    },
}


def recipe_of(name: str, attention_type: str, device: str, tiny: bool = False) -> Recipe:
    """One of the recipes, or the tiny one of its kind."""
    given = RECIPES[name]
    data = {"kind": "retrieval", "length": 1024, "validation_sequences": 1, **given.get("data", {})}
    return parse_recipe(
        {
            "name": name,
            "model": {**MODEL, **given.get("model", {}), **(TINY if tiny else {}), "attention_type": attention_type},
            "data": {**data, "length": 128} if tiny else data,
            "train": {
                "steps": STEPS + 1,  # the last one saves the model, which takes memory of its own
                "learning_rate": 1e-4,
                "inspect_every": None,
                "device": "cpu" if device == "cpu" else "auto",
                **given.get("train", {}),
            },
        }
    )


class Enough(Exception):  # noqa: N818  # no error: it ends a run whose memory is known
    """The second step is done: the optimizer's state was there from its beginning."""


class Peak(Progress):
    """Ends a run after its second step, and remembers the most memory that was in use until then."""

    def __init__(self, device: torch.device) -> None:
        self.meter, self.bytes = Meter(device), 0

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        del loss, tokens_per_second
        self.bytes = self.meter.peak()
        if step == STEPS:
            raise Enough


def measure(name: str, attention_type: str, device: str) -> int:
    """Bytes at the peak of a run's steps, above what this process takes before it."""
    with tempfile.TemporaryDirectory() as folder:
        train(recipe_of(name, attention_type, device, tiny=True), Path(folder) / "tiny")
        gc.collect()
        peak = Peak(torch.device(device))
        base = peak.meter.now()
        peak.meter.reset()
        with suppress(Enough):
            train(recipe_of(name, attention_type, device), Path(folder) / "run", progress=peak)
    return peak.bytes - base


def compare(name: str, attention_type: str, device: str, gpu: str) -> dict[str, Any]:
    """One row: a recipe's plan, and its measurement in a process of its own."""
    recipe = recipe_of(name, attention_type, device)
    made = Plan(recipe, gpu)
    way = made.ways[recipe.train.gradient_checkpointing]
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--worker", name, attention_type]
    measured, kept = (_bytes(command, environment) for environment in (MALLOC, {}))
    parts = {field: value / MIB for field, value in dataclasses.asdict(way.memory).items()}
    return {
        "recipe": name,
        "attention_type": attention_type,
        "parameters": made.parameters,
        "planned_mib": way.memory.total / MIB,
        "measured_mib": measured / MIB,
        "error": way.memory.total / measured - 1,
        "measured_with_kept_blocks_mib": kept / MIB,
        "parts_mib": parts,
    }


def _bytes(command: list[str], environment: dict[str, str]) -> int:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description="The plan's memory beside what training takes.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", default="h200", help="the plan's name of the GPU, with --device cuda")
    parser.add_argument("--output", type=Path, default=HERE / "plan_memory.json")
    parser.add_argument("--only", help="measure this recipe alone, and write nothing")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        name, kind = given.worker
        print(measure(name, kind, given.device))
        return
    if (reason := unavailable_reason(torch.device(given.device))) is not None:
        sys.exit(reason)
    rows = []
    print(f"{'recipe':20} {'type':8} {'parameters':>11} {'planned':>9} {'measured':>9} {'error':>6} {'kept':>6}")
    for name in RECIPES if given.only is None else [given.only]:
        for kind in ("diff", "softmax"):
            row = compare(name, kind, given.device, "cpu" if given.device == "cpu" else given.gpu)
            rows.append(row)
            print(
                f"{name:20} {kind:8} {row['parameters']:11,} {row['planned_mib']:9.0f} {row['measured_mib']:9.0f}  "
                f"{row['error']:+6.1%} {row['measured_with_kept_blocks_mib']:6.0f}",
                flush=True,
            )
    if given.only is not None:
        return
    worst = max(abs(row["error"]) for row in rows)
    print(f"MiB; the plan is within {worst:.1%} of the measured peak (limit {LIMIT:.0%}): {worst <= LIMIT}")
    settings = {"steps": STEPS, "malloc": MALLOC if given.device == "cpu" else None, "limit": LIMIT, "recipes": RECIPES}
    environment = vars(capture_environment(given.device))
    document = {**environment, "settings": {"model": MODEL, **settings}, "worst": worst, "rows": rows}
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
