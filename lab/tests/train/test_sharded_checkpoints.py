"""Checkpoints of several processes: what any of them wrote, every other reads, bit for bit.

Two ranks run this file as a script. Models are shared in three ways: "single" (one process, here), "ddp" (the same on
both ranks) and "fsdp" (each rank has a part).
"""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import ranks
from diff_lab.train.checkpoint import (
    Checkpoints,
    RunState,
    collective_directory,
    load_checkpoint,
    save_model,
    weights_of,
)
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.nn import Lambda
from tiny_model import SIZES

pytestmark = pytest.mark.all

# The kinds of models: DIFF with both optimizers, and one whose head is its embedding.
MODELS: dict[str, dict[str, Any]] = {
    "muon": {"attention_type": "diff"},
    "tied": {"attention_type": "softmax", "tie_word_embeddings": True},
}
SPREAD = ("ddp", "fsdp")
WAYS = ("single", *SPREAD)
STATE = RunState(data="x", step=7, seconds=1.5, spike_detector={"losses": [3.0, 2.5]})
TOKENS = torch.arange(1, 9).view(2, 4)


def build(name: str, seed: int) -> DiffTransformerForCausalLM:
    torch.manual_seed(seed)
    return DiffTransformerForCausalLM(DiffTransformerConfig(**{**SIZES, **MODELS[name]}))


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest and for all of a model without λ."""
    inside = {name: p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
    outside = [p for name, p in model.named_parameters() if name not in inside]
    if not any(isinstance(module, Lambda) for module in model.modules()):
        return [torch.optim.AdamW([*outside, *inside.values()], foreach=False)]
    return [torch.optim.AdamW(outside, foreach=False), torch.optim.Muon(inside.values())]


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    for optimizer in optimizers:
        optimizer.step()


def spread(way: str, name: str) -> nn.Module:
    """A model with weights that no checkpoint holds."""
    model = build(name, seed=2)
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model).module
    for module in model.modules():
        if isinstance(module, Lambda):
            fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def on_a_rank() -> None:
    """Read every checkpoint in every way and write it again; first the one that one process has written."""
    rank, folder = ranks.join()
    for name in MODELS:
        for writer in WAYS:
            for reader in SPREAD:
                model = spread(reader, name)
                optimizers = optimizers_of(model)
                split = any(isinstance(parameter, DTensor) for parameter in model.parameters())
                assert split == (reader == "fsdp")
                checkpoint = Checkpoints(folder / name / writer, keep=2).newest()
                assert checkpoint is not None
                state = load_checkpoint(checkpoint, model, optimizers)
                assert state == STATE
                if writer == "single":
                    torch.manual_seed(100 + rank)
                    with torch.no_grad():  # as in an evaluation, after which FSDP leaves some units whole
                        model(TOKENS)
                target = folder / name / (reader if writer == "single" else f"{reader} from {writer}")
                Checkpoints(target, keep=2).save(state, model, optimizers, None)
                if writer == "single":
                    with collective_directory(folder / name / f"{reader} model") as unfinished:
                        save_model(unfinished, model, None)
                    step(model, optimizers)  # the state has the dtype, device and placement that the optimizer needs
                    assert all(parameter.isfinite().all() for parameter in model.parameters())
    _failures(folder, rank)
    dist.destroy_process_group()


def _failures(folder: Path, rank: int) -> None:
    """An error of one rank is an error of both: at once, in words, and with nothing left behind."""
    model = spread("fsdp", "tied")
    optimizers = optimizers_of(model)
    checkpoints = Checkpoints(folder / "failing", keep=1)
    intact = checkpoints.save(STATE, model, optimizers, None)
    step(model, optimizers)
    if rank == 1:  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))
    with pytest.raises(OSError, match="cannot be written") as full:
        checkpoints.save(RunState(data="x", step=8), model, optimizers, None)
    (folder / f"message {rank}").write_text(str(full.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    dist.barrier()
    assert [path.name for path in (folder / "failing").iterdir()] == [intact.name]
    if rank == 0:  # which reads the files for all
        damaged = shutil.copytree(intact, folder / "damaged" / intact.name) / "model.safetensors"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    dist.barrier()
    with pytest.raises(OSError, match=r"step-000007: model.* has changed since it was written"):
        Checkpoints(folder / "damaged", keep=1).newest()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which one process wrote a checkpoint of each model, and the ranks all others."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in MODELS:
        model = build(name, seed=1)
        optimizers = optimizers_of(model)
        step(model, optimizers)
        step(model, optimizers)
        Checkpoints(folder / name / "single", keep=2).save(STATE, model, optimizers, None)
    ranks.run(__file__, folder)
    return folder


def contents(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """What one process finds in a checkpoint: weights and optimizer state, by name."""
    model = build(name, seed=3)
    optimizers = optimizers_of(model)
    assert load_checkpoint(checkpoint, model, optimizers) == STATE
    tensors = dict(weights_of(model))
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return tensors


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reader", SPREAD)
@pytest.mark.parametrize("writer", WAYS)
def test_every_way_reads_what_every_other_wrote(written: Path, writer: str, reader: str, name: str) -> None:
    """Against the very files of the one process, which are read here without any of our code."""
    target = written / name / (reader if writer == "single" else f"{reader} from {writer}")
    tensors = contents(target / "step-000007", name)
    first = written / name / "single" / "step-000007"
    expected = load_file(first / "model.safetensors") | load_file(first / "optimizer.safetensors")
    assert tensors.keys() == expected.keys()
    assert len({key.rpartition("/")[2] for key in tensors if "/" in key}) == (4 if name == "muon" else 3)
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), key
        assert tensors[key].dtype == torch.float32


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_and_a_finished_model_are_loaded_by_transformers(written: Path, way: str, name: str) -> None:
    expected = load_file(written / name / "single" / "step-000007" / "model.safetensors")
    folders = [written / name / way / "step-000007"]
    folders += [written / name / f"{way} model"] if way in SPREAD else []
    for folder in folders:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        tensors = weights_of(model)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected.items())
        single = written / name / "single" / "step-000007" / "config.json"
        assert (folder / "config.json").read_bytes() == single.read_bytes()


def test_each_rank_writes_its_part_of_the_optimizer_and_nothing_is_pickled(written: Path) -> None:
    sizes = [file.stat().st_size for file in (written / "muon" / "fsdp" / "step-000007" / "optimizer").iterdir()]
    assert len(sizes) == ranks.RANKS
    assert max(sizes) < 0.6 * sum(sizes)
    endings = {path.suffix for path in (written / "muon").rglob("*") if path.is_file()}
    assert endings == {".json", ".safetensors", ".py"}


def test_each_rank_goes_on_with_its_own_random_numbers(written: Path) -> None:
    random = load_file(written / "muon" / "fsdp from ddp" / "step-000007" / "random.safetensors")
    for rank in range(ranks.RANKS):
        torch.manual_seed(100 + rank)
        assert torch.equal(random[f"cpu/{rank}"], torch.get_rng_state())


def test_a_rank_that_fails_stops_the_others(written: Path) -> None:
    target, intact = (str(written / "failing" / f"step-{step:06d}") for step in (8, 7))
    for rank in range(ranks.RANKS):
        message = (written / f"message {rank}").read_text()
        assert message.startswith(f"{target!r} cannot be written: there is no room for it (Process 1: ")
        assert "File too large" in message
        assert message.endswith(f"are free; the checkpoint {intact!r} is intact.")
        assert "\n" not in message


if __name__ == "__main__":
    on_a_rank()
