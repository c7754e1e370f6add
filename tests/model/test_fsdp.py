"""FSDP2: two ranks with half of the batch and of the parameters each give what one process gives on all of it.

The sharding is that of transformers' plan, of torch's ``fully_shard`` over the decoder layers, and of accelerate's wrap
policy. The ranks run this file as a script.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import distributed as transformers_distributed

import ranks
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.nn import Lambda, layers
from tiny_model import FORMS, has_lambda_vectors, name_of_form

# lab/tests/train/test_distributed.py trains with FSDP2 in `make test`.
pytestmark = pytest.mark.all

TOKENS = torch.arange(1, 19).view(2, 9)  # a row for each rank
IN_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Earlier releases of transformers 5 have no FSDP plans, or plans that know nothing of what stays in float32.
GROUPS_FLOAT32 = hasattr(DiffTransformerForCausalLM, "_resolve_parallel_plans")
HAS_PLAN = "fsdp_size" in inspect.signature(transformers_distributed.DistributedConfig).parameters


def shard(model: nn.Module, policy: MixedPrecisionPolicy, lambda_units: bool) -> nn.Module:
    """torch's recipe, a unit for each decoder layer; and one for each λ, where asked for."""
    for module in model.modules() if lambda_units else ():
        if isinstance(module, Lambda):
            fully_shard(module)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def shard_as_accelerate(model: nn.Module) -> nn.Module:
    """Its own function on its own plugin; on a CPU an Accelerator would leave FSDP out."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


@contextmanager
def dtypes_of_lambda() -> Iterator[set[str]]:
    """The dtypes of the vectors that λ is computed from inside."""
    seen: set[str] = set()
    compute = layers.lambda_value

    def spy(*vectors: Any) -> Tensor:
        seen.update(str(vector.dtype) for vector in vectors[:4])
        return compute(*vectors)

    layers.lambda_value = spy
    yield seen
    layers.lambda_value = compute


def answers(model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """Loss and gradients, whole, after two backward passes."""
    for labels in (rows, rows.flip(1)):
        loss = model(rows, labels=labels).loss
        loss.backward()
    computed = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        computed[f"gradient of {name}"] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: value.contiguous() for name, value in computed.items()}


def on_a_rank() -> None:
    """What a rank finds: its loss and the gradients, and for mixed dtypes the dtypes."""
    rank, folder = ranks.join()
    rows = TOKENS[rank : rank + 1]

    def load(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> DiffTransformerForCausalLM:
        return DiffTransformerForCausalLM.from_pretrained(folder / kind, dtype=dtype, **options)

    for kind in map(name_of_form, FORMS):
        models = {
            "torch": shard(load(kind), MixedPrecisionPolicy(), False),
            "accelerate": shard_as_accelerate(load(kind)),
        }
        if HAS_PLAN:
            plan = transformers_distributed.DistributedConfig(fsdp_size=ranks.RANKS)
            models["transformers"] = load(kind, distributed_config=plan)
        for name, model in models.items():
            save_file(answers(model, rows), folder / f"{name} {kind} {rank}.safetensors")
            units = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
            (folder / f"{name} {kind} units").write_text(json.dumps(units))
        if HAS_PLAN:
            models["transformers"].save_pretrained(folder / f"{kind} saved")

    half = torch.bfloat16
    mixed = {
        "float32 model, all in bfloat16": lambda: shard(load("diff", torch.float32), IN_BFLOAT16, False),
        "float32 model, λ left out": lambda: shard(load("diff", torch.float32), IN_BFLOAT16, True),
        "bfloat16 model, λ left out": lambda: shard(load("diff", half), MixedPrecisionPolicy(), True),
        "bfloat16 model, accelerate": lambda: shard_as_accelerate(load("diff", half)),
    }
    if GROUPS_FLOAT32:
        mixed["bfloat16 model, transformers"] = lambda: load("diff", half, distributed_config=plan)
    report = {}
    for name, build in mixed.items():
        model = build()
        with dtypes_of_lambda() as seen:
            computed = answers(model, rows)
        assert all(value.isfinite().all() for value in computed.values())
        held = {str(value.dtype) for path, value in model.named_parameters() if ".lam." in path}
        report[name] = {"held": sorted(held), "computed from": sorted(seen)}
    with pytest.raises(AssertionError, match="uniform") as refused:
        answers(shard(load("diff", half), MixedPrecisionPolicy(), False), rows)
    report["bfloat16 model, λ in the layer's unit"] = str(refused.value)
    (folder / f"dtypes {rank}").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, make: Any) -> Path:
    """The folder in which both ranks have written what they found."""
    return ranks.spread_models(__file__, tmp_path_factory.mktemp("ranks"), make)


@pytest.mark.parametrize("sharding", ["torch", "accelerate", "transformers"])
def test_two_ranks_give_what_one_process_gives(sharding: str, kind: str, spread: Path, make: Any, check: Any) -> None:
    """The mean of the ranks' losses, and every gradient: λ's, the headwise norm's and the embedding's among them."""
    if sharding == "transformers" and not HAS_PLAN:
        pytest.skip("this release of transformers has no FSDP plans")
    expected = answers(make(kind), TOKENS)
    computed = [
        load_file(spread / f"{sharding} {name_of_form(kind)} {rank}.safetensors") for rank in range(ranks.RANKS)
    ]
    check(torch.stack([of_rank.pop("loss") for of_rank in computed]).mean(), expected.pop("loss"))
    for of_rank in computed:
        assert of_rank.keys() == expected.keys()
        for name, value in expected.items():
            assert value.abs().max() > 0, name
            check(of_rank[name], value)


def test_what_becomes_a_unit(kind: str, spread: Path) -> None:
    """By the plan, as Llama's: the embedding, each layer, the last norm, the head; accelerate adds each λ."""
    layers = {"model.layers.0", "model.layers.1"}
    others = {"", "model.embed_tokens", "model.norm", "lm_head"}
    lambdas = {f"{layer}.self_attn.lam" for layer in layers} if has_lambda_vectors(kind) else set()
    units = {
        name: set(json.loads((spread / f"{name} {name_of_form(kind)} units").read_text()))
        for name in ("torch", "accelerate", *(["transformers"] if HAS_PLAN else []))
    }
    assert units["torch"] == {"", *layers}
    assert units["accelerate"] >= layers | lambdas
    if HAS_PLAN:
        assert units["transformers"] == layers | others


@pytest.mark.skipif(not HAS_PLAN, reason="this release of transformers has no FSDP plans")
def test_saving_from_two_ranks(kind: str, spread: Path) -> None:
    ranks.check_saved_alike(spread, name_of_form(kind))


def test_lambda_in_mixed_precision(spread: Path) -> None:
    """λ's vectors are always held in float32; a policy rounds them for use, unless λ is a unit without one.

    torch refuses a unit of two dtypes, so a bfloat16 model's λ must be a unit: transformers and accelerate see to it.
    """
    for rank in range(ranks.RANKS):
        report = json.loads((spread / f"dtypes {rank}").read_text())
        assert "uniform" in report.pop("bfloat16 model, λ in the layer's unit")
        assert all(entry["held"] == ["torch.float32"] for entry in report.values()), report
        rounded = report.pop("float32 model, all in bfloat16")
        assert rounded["computed from"] == ["torch.bfloat16"]
        assert all(entry["computed from"] == ["torch.float32"] for entry in report.values()), report


if __name__ == "__main__":
    on_a_rank()
