"""`diff-lab plan`"""

import json
from pathlib import Path

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.train.recipe import dump_recipe, load_recipe


def test_a_plan_is_printed() -> None:
    few = ("model.num_hidden_layers=2", "model.vocab_size=1000")
    result = succeeds(run("plan", "paper-3b", *few, "--gpus", 64, "--gpu", "h200", "--utilisation", 0.5))
    assert "\x1b" not in result.stdout
    for part in (
        "parameters       229,581,312",
        "run              83,447 steps of 4,194,304 tokens",
        "on               64 × h200, precision bf16",
        " tokens/s, at 50% of 990 TFLOP/s",
        "8 replicas × 8 shards          4 at a time, without checkpointing: fits",
        "    5 × allgather of 8 ranks a pass, 0.86 GiB",
        "torchrun --nnodes 8 --nproc-per-node 8 -m diff_lab.titan paper-3b model.num_hidden_layers=2 "
        "model.vocab_size=1000 train.gradient_checkpointing=false -- "
        "--training.local-batch-size 4 --parallelism.data-parallel-replicate-degree 8\n",
    ):
        assert part in result.stdout


def test_this_machine_and_one_machine_of_gpus(tmp_path: Path) -> None:
    printed = run("plan", "tiny").stdout
    assert "on               this machine's processor, precision no" in printed
    assert "memory           MiB on each when most is held" in printed
    assert "data             the source of Python's standard library" in printed
    assert "diff-lab train tiny train.parallel=auto train.accumulation=1" in printed
    printed = run("plan", "tiny", "train.parallel=fsdp", "--gpu", "RTX 4090", "--gpus", 4).stdout
    assert "torchrun --nproc-per-node 4 -m diff_lab.train tiny train.parallel=fsdp train.parallel=fsdp" in printed
    mine = tmp_path / "my file.yaml"  # whose name is that of a recipe that is shipped
    mine.write_text(dump_recipe(load_recipe("tiny")), encoding="utf-8")
    printed = run("plan", mine, "data.paths=[a, b]").stdout
    assert f"diff-lab train '{mine}' 'data.paths=[a, b]' train.parallel=auto" in printed
    printed = run("plan", "small", "train.accumulation=2", "--gpu", "l4", "--gpus", 2, "--json")
    counted = json.loads(printed.stdout)["chosen"]
    assert (counted["layout"]["replicas"], counted["micro_batch"]) == (2, 8)
    assert counted["messages"]["allreduce of 2"][1] == counted["gradients"]


def test_bad_input() -> None:
    fails(run("plan", "paper-3b", "--gpu", "tpu"), "GPU 'tpu' is not known; known ones are b200")
    fails(run("plan", "tiny", "--gpu", "l4", "--gpus", -1), "'--gpus': Input should be greater than or equal to 1")
    fails(
        run("plan", "tiny", "train.parallel=tensor"), "'train.parallel' is 'tensor'; input should be 'auto', 'ddp' or"
    )
