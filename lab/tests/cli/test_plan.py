"""`diff-lab plan`"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from commands import fails

Run = Callable[..., Any]


def test_a_plan_is_printed(run: Run) -> None:
    result = run("plan", "paper-3b", "--gpus", 64, "--gpu", "h200", "--utilisation", 0.5)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for part in (
        "parameters       3,479,175,168",
        "operations       2.3e+10 FLOPs per token",
        "on               64 × h200, weights sharded (fsdp), precision bf16",
        "time             2 days, 22:",
        " tokens/s, at 50% of 990 TFLOP/s",
        "disk             41.8 GB a checkpoint",
        "without checkpointing (the recipe's)   with checkpointing",
        "train.gradient_checkpointing=true: fits with train.accumulation=1, 16 sequences at a time",
    ):
        assert part in result.stdout


def test_settings_and_the_way_of_sharing_are_taken(run: Run) -> None:
    printed = run("plan", "paper-830m", "train.accumulation=2", "train.parallel=fsdp", "--gpu", "l4", "--gpus", 4)
    assert "4 × l4, weights sharded (fsdp)" in printed.stdout
    assert "16 sequences at a time (train.accumulation=2)" in printed.stdout
    printed = run("plan", "tiny")
    assert "on               this machine's processor, precision no" in printed.stdout
    assert "memory           MiB on each when most is held" in printed.stdout
    assert "data             the source of Python's standard library" in printed.stdout


def test_json(run: Run) -> None:
    printed = json.loads(run("plan", "paper-830m", "--gpus", 8, "--gpu", "h100", "--json").stdout)
    assert printed["kind"] == "ddp"
    memory = printed["ways"][1]["memory"]
    parts = ("weights", "gradients", "optimizer", "activations")
    assert memory["total"] == pytest.approx(sum(memory[name] for name in parts))


def test_bad_input(run: Run) -> None:
    fails(run("plan", "paper-3b", "--gpu", "tpu"), "GPU 'tpu' is not known; known ones are b200")
    fails(run("plan", "paper-4b"), "There is no recipe 'paper-4b'")
    fails(run("plan", "tiny", "train.stepz=3"), "did you mean 'train.steps'?")
    fails(run("plan", "tiny", "--gpu", "l4", "--gpus", -1), "'--gpus': Input should be greater than or equal to 1")
    fails(
        run("plan", "tiny", "train.parallel=tensor"), "'train.parallel' is 'tensor'; input should be 'auto', 'ddp' or"
    )
