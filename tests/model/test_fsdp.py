"""FSDP2: two ranks with half of the batch and of the parameters each give what one process gives on all of it.

The sharding is that of transformers' plan, and of accelerate's wrap policy; test_parallel.py has our own. The ranks run
this file as a script.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import distributed as transformers_distributed

import ranks
from diff_transformer import DiffTransformerForCausalLM
from tiny_model import FORMS, make, name_of_form
from tiny_model import check_rounding as check

# lab/tests/train/test_distributed.py trains with FSDP2 in `make test`.
pytestmark = pytest.mark.all

TOKENS = torch.arange(1, 19).view(2, 9)  # a row for each rank
# Earlier releases of transformers 5 have no FSDP plans.
HAS_PLAN = "fsdp_size" in inspect.signature(transformers_distributed.DistributedConfig).parameters


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
    """What a rank finds: its loss and the gradients; λ of a model in bfloat16 is in float32."""
    rank, folder = ranks.join()
    rows = TOKENS[rank : rank + 1]

    def load(kind: str, dtype: torch.dtype = torch.float64, **options: Any) -> DiffTransformerForCausalLM:
        return DiffTransformerForCausalLM.from_pretrained(folder / kind, dtype=dtype, **options)

    plan = transformers_distributed.DistributedConfig(**({"fsdp_size": ranks.RANKS} if HAS_PLAN else {}))
    for kind in map(name_of_form, FORMS):
        models = {"accelerate": shard_as_accelerate(load(kind))}
        if HAS_PLAN:
            models["transformers"] = load(kind, distributed_config=plan)
        for name, model in models.items():
            save_file(answers(model, rows), folder / f"{name} {kind} {rank}.safetensors")
        if HAS_PLAN:
            models["transformers"].save_pretrained(folder / f"{kind} saved")

    half = {"accelerate": shard_as_accelerate(load("diff", torch.bfloat16))}
    if HAS_PLAN:
        half["transformers"] = load("diff", torch.bfloat16, distributed_config=plan)
    for model in half.values():  # torch refuses a unit of two dtypes
        assert all(value.isfinite().all() for value in answers(model, rows).values())
        assert {value.dtype for path, value in model.named_parameters() if ".lam." in path} == {torch.float32}
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both ranks have written what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    for form in FORMS:
        make(form).save_pretrained(folder / name_of_form(form))
    ranks.run(__file__, folder)
    return folder


@pytest.mark.parametrize("sharding", ["accelerate", "transformers"])
def test_two_ranks_give_what_one_process_gives(sharding: str, kind: str, spread: Path) -> None:
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


@pytest.mark.skipif(not HAS_PLAN, reason="this release of transformers has no FSDP plans")
def test_saving_from_two_ranks(kind: str, spread: Path) -> None:
    ranks.check_saved_alike(spread, name_of_form(kind))


if __name__ == "__main__":
    on_a_rank()
