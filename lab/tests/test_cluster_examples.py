"""The files that start a recipe on a cluster: their tools accept them, and all start the same training."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from diff_lab.train import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
REPLICAS = "--parallelism.data-parallel-replicate-degree"  # HSDP: a copy of the model on each machine
# pip puts the program beside the interpreter, which need not be on the path.
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def started(command: list[str], module: str = "diff_lab.titan") -> Any:
    """What torchrun's own parser understands; it refuses what it does not know."""
    program, *arguments = command
    assert program == "torchrun"
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module
    assert parsed.training_script == module
    return parsed


def of_the_module(parsed: Any) -> list[str]:
    return shlex.split(" ".join(parsed.training_script_args).replace("=", " "))


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment of a job, with stand-ins for Slurm's commands; srun writes down what it is to start."""
    for name, script in {
        "scontrol": 'printf "%s\\n" node7 node9',
        "srun": f'printf "%s\\n" "$@" > {tmp_path}/started',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    job |= {"SLURM_JOB_NODELIST": "node[7,9]"}
    return {**job, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


def test_slurm_starts_torchrun_on_every_machine(slurm: dict[str, str], tmp_path: Path) -> None:
    script = [shutil.which("bash") or "bash", str(FOLDER / "train.sbatch")]
    subprocess.run([*script, "my recipe.yaml", "/shared/runs/a b"], env=slurm, check=True)
    parsed = started((tmp_path / "started").read_text().splitlines())
    assert (parsed.nnodes, parsed.nproc_per_node) == ("2", "8")
    assert (parsed.rdzv_endpoint, parsed.rdzv_id) == ("node7:29500", "17")
    expected = ["my recipe.yaml", "--output=/shared/runs/a b", "--", REPLICAS, "2"]
    assert parsed.training_script_args == expected
    refused = subprocess.run(script, env=slurm, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "the recipe, as in: sbatch train.sbatch" in refused.stderr
    assert load_recipe(FOLDER / "recipe.yaml").data.batch_size % 16 == 0  # two machines of eight GPUs


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_the_shell_in_them_is_sound() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    scripts = {"train.sbatch": (FOLDER / "train.sbatch").read_text(encoding="utf-8")}
    exported = "export RECIPE OUTPUT SKYPILOT_NUM_GPUS_PER_NODE\n"
    scripts |= {name: f"#!/bin/bash\n{exported}{task[name]}" for name in ("setup", "run")}
    for name, script in scripts.items():
        done = subprocess.run([SHELLCHECK, "-"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}"


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of a manifest is not in what its schema made of it."""
    if isinstance(given, dict):
        names = [f"{path}.{name}" for name in given if not isinstance(kept, dict) or name not in kept]
        return names + [
            one for name in given if name in kept for one in lost(given[name], kept[name], f"{path}.{name}")
        ]
    if isinstance(given, list):
        pairs = zip(given, kept, strict=True)
        return [one for number, pair in enumerate(pairs) for one in lost(*pair, f"{path}[{number}]")]
    return [] if given == kept else [f"{path}: {given!r} → {kept!r}"]


def test_the_manifest_is_a_jobset() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load((FOLDER / "jobset.yaml").read_text(encoding="utf-8"))
    read = models.JobsetV1alpha2JobSet.from_dict(manifest)
    assert lost(manifest, read.to_dict()) == []
    manifest["spec"]["replicatedJob"] = []
    assert lost(manifest, models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()) == [".spec.replicatedJob"]


def test_the_pods_of_the_manifest_meet() -> None:
    manifest = yaml.safe_load((FOLDER / "jobset.yaml").read_text(encoding="utf-8"))
    name, (workers,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    parsed = started(container["command"])
    assert int(parsed.nnodes) == job["parallelism"] == job["completions"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    # The name of the first pod, which JobSet makes of the set's, the job's, and two numbers.
    assert parsed.rdzv_endpoint == f"{name}-{workers['name']}-0-0.{name}:29500"
    assert parsed.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert of_the_module(parsed)[-5:] == ["--output", "/shared/runs/mine", "--", REPLICAS, parsed.nnodes]


def test_skypilot_starts_torchrun() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text(encoding="utf-8"))
    run = task["run"].replace("\\\n", " ")
    parsed = started(
        shlex.split(run.replace('"$SKYPILOT_NUM_GPUS_PER_NODE"', task["resources"]["accelerators"][-1])),
        "diff_lab.train",
    )
    assert parsed.nproc_per_node == "8"
    assert of_the_module(parsed) == ["$RECIPE", "--output", "$OUTPUT", "--resume", "auto"]
    assert all(task["envs"][name].startswith("/shared/") for name in ("RECIPE", "OUTPUT"))
    assert (FOLDER / task["workdir"] / "constraints.txt").is_file()
