"""Packed documents and the loss without whole logits on two ranks: DDP, FSDP2 and tensor parallelism.

Each gives the gradients that one process finds from plain logits. The ranks run this file as a script.
"""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import distributed as transformers_distributed

import ranks
from diff_lab.data.batches import flattened
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model import chunked_loss as model_loss

CONFIGS: dict[str, dict[str, Any]] = {
    "diff": {"vocab_size": 30},
    "softmax": {"vocab_size": 30, "tie_word_embeddings": True},
}
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])  # a row for each rank
TOKENS = torch.arange(1, 19).view(2, 9)
BATCH = {
    "input_ids": TOKENS,
    "labels": TOKENS.flip(1).masked_fill(POSITIONS == 0, -100),
    "position_ids": POSITIONS,
}
TARGETS = int((BATCH["labels"] != -100).sum())
# Releases of transformers 5 differ in what they spread a model by.
SIZES = inspect.signature(transformers_distributed.DistributedConfig).parameters
WAYS = {
    "DDP": "ordinary",
    "FSDP2": "ordinary",  # the head is a part of the root's unit, and whole while that runs
    "FSDP2, the head a unit": "called",
    "tensor": "called",
}


def spread(way: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    """The model, and what is called."""
    options: dict[str, Any] = {}
    if way == "FSDP2, the head a unit":
        options["distributed_config"] = transformers_distributed.DistributedConfig(fsdp_size=ranks.RANKS)
    elif way == "tensor":
        options["distributed_config"] = transformers_distributed.DistributedConfig(tp_size=ranks.RANKS)
    model = DiffTransformerForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).train()
    if way == "DDP":
        return model, DistributedDataParallel(model)
    if way == "FSDP2":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def unsharded(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).contiguous()


def on_a_rank() -> None:
    """The gradients of two parts of the batch, two backward passes before they are read, and how the loss was made."""
    rank, folder = ranks.join()
    model_loss.CORE_LOGITS = 4 * 30
    calls: list[str] = []
    apply, summed = model_loss._SummedCrossEntropy.apply, model_loss._summed
    model_loss._SummedCrossEntropy.apply = lambda *args: calls.append("ordinary") or apply(*args)
    model_loss._summed = lambda *args: calls.append("called") or summed(*args)
    report = {}
    for way in json.loads((folder / "ways").read_text()):
        for kind in CONFIGS:
            calls.clear()
            model, call = spread(way, folder / kind)
            rows = slice(None) if way == "tensor" else slice(rank, rank + 1)
            items = TARGETS / (1 if way == "tensor" else ranks.RANKS)  # the ranks' gradients are averaged
            batch = flattened({name: value[rows] for name, value in BATCH.items()})
            losses = []
            for _ in range(2):
                out = call(**batch, use_cache=False, num_items_in_batch=items, chunked_loss=True)
                assert out.logits is None
                out.loss.backward()
                losses.append(out.loss.detach())
            computed = {name: unsharded(value) for name, value in gradients(model).items()}
            save_file(computed | {"loss": torch.stack(losses)}, folder / f"{way} {kind} {rank}.safetensors")
            report[f"{way} {kind}"] = sorted(set(calls))
    (folder / f"report {rank}").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


def here() -> list[str]:
    """What this release of transformers spreads models by."""
    missing = {"FSDP2, the head a unit": "fsdp_size" not in SIZES, "tensor": "tp_size" not in SIZES}
    return [way for way in WAYS if not missing.get(way)]


@pytest.fixture(scope="module")
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory, make: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    for kind, config in CONFIGS.items():
        make(kind, **config).save_pretrained(folder / kind)
    (folder / "ways").write_text(json.dumps(here()))
    ranks.run(__file__, folder)
    return folder


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_give_what_one_process_gives(
    way: str, kind: str, folder_of_ranks: Path, make: Any, check: Any
) -> None:
    if way not in here():
        pytest.skip("this release of transformers does not spread models so")
    model = make(kind, **CONFIGS[kind])
    loss = model(**BATCH, use_cache=False, num_items_in_batch=TARGETS).loss
    (2 * loss).backward()
    expected = gradients(model)
    losses = []
    for rank in range(ranks.RANKS):
        of_rank = load_file(folder_of_ranks / f"{way} {kind} {rank}.safetensors")
        losses.append(of_rank.pop("loss"))
        assert of_rank.keys() == expected.keys()
        for name, value in expected.items():
            assert value.any(), name
            check(of_rank[name], value, least=0.1, dtype=torch.float32)  # transformers' loss is in float32
        report = json.loads((folder_of_ranks / f"report {rank}").read_text())
        # A head that is tied to the embedding is no unit of its own.
        tied = way == "FSDP2, the head a unit" and kind == "softmax"
        assert report[f"{way} {kind}"] == ["ordinary" if tied else WAYS[way]]
    check(torch.stack(losses).mean(0), loss.detach().double().expand(2), dtype=torch.float32)


if __name__ == "__main__":
    on_a_rank()
