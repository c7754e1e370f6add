"""What a plan says that GPUs send each other, against the collectives of ranks that do not really exist."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import distributed as transformers_distributed

from diff_lab.train.distributed import shard
from diff_lab.train.recipe import TrainRecipe
from diff_lab.train.step_costs import Communication, ModelSizes, StepLayout, communication, meta_model
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # not promised by torch to stay
RANKS = 4
TOKENS = (2, 16)


@pytest.fixture
def _ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)}.items():
        monkeypatch.setitem(os.environ, name, value)
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or scattered; an all-reduce is both."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and any(part in name for part in ("all_reduce", "allreduce", "gather", "scatter")):
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            full_size = max(t.numel() * t.element_size() for t in tensors)
            if "_c10d_functional" in name and "gather" in name:  # its one tensor is a rank's part
                full_size *= RANKS
            self.gathered += full_size * (2 if "reduce" in name and "scatter" not in name else 1)
        return func(*args, **(kwargs or {}))


def sizes_config(layers: int, attention_type: str = "diff") -> DiffTransformerConfig:
    return DiffTransformerConfig(
        attention_type=attention_type,
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=8,
        head_dim=16,
    )


def planned(config: DiffTransformerConfig, **settings: Any) -> Communication:
    recipe = TrainRecipe.model_validate({"steps": 1, "learning_rate": 1e-3})
    defaults: dict[str, Any] = {
        "kind": "fsdp",
        "devices": RANKS,
        "sequences": TOKENS[0],
        "length": TOKENS[1],
        "parts": 1,
        "half": False,
        "checkpointing": False,
        "backend": "cpu",
        "on_cpu": False,
    }
    layout = StepLayout(**defaults | settings)
    received = communication(config, ModelSizes(meta_model(config), recipe), layout, 450e9, 50e9)
    assert received is not None
    return received


def gathered_in_a_step(model: Any, half: bool, checkpointing: bool) -> int:
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    tokens = torch.zeros(*TOKENS, dtype=torch.long)
    with Collectives() as collectives, torch.autocast("cpu", torch.bfloat16, enabled=half):
        model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
    return collectives.gathered


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(("half", "checkpointing"), [(False, False), (True, False), (True, True)])
def test_fsdp_gathers_and_scatters_what_the_plan_says(half: bool, checkpointing: bool) -> None:
    config = sizes_config(4)
    model = DiffTransformerForCausalLM(config).train()
    shard(model, "cpu", RANKS, "bf16" if half else "no")
    received = gathered_in_a_step(model, half, checkpointing)
    plan = planned(config, half=half, checkpointing=checkpointing)
    assert plan.received == pytest.approx(received * (RANKS - 1) / RANKS, rel=0.01)


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(
    ("attention_type", "half", "checkpointing"),
    [("diff", False, False), ("diff", True, True), ("diff_v2", True, False), ("softmax", True, False)],
)
def test_tensor_parallel_layers_add_up_what_the_plan_says(
    attention_type: str, half: bool, checkpointing: bool, tmp_path: Path
) -> None:
    if "tp_size" not in getattr(transformers_distributed.DistributedConfig, "__dataclass_fields__", {}):
        pytest.skip("tensor parallelism needs a later release of transformers")
    received, plan = [], []
    for layers in (1, 3):
        config = sizes_config(layers, attention_type)
        folder = tmp_path / str(layers)
        DiffTransformerForCausalLM(config).save_pretrained(folder)
        split = transformers_distributed.DistributedConfig(tp_size=RANKS)
        model = DiffTransformerForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=split)
        received.append(gathered_in_a_step(model.train(), half, checkpointing))
        settings = {"kind": "tensor", "half": half, "checkpointing": checkpointing}
        plan.append(planned(config, **settings).received * RANKS / (RANKS - 1))
    assert plan[1] - plan[0] == pytest.approx(received[1] - received[0], rel=0.01)
    assert plan[0] == pytest.approx(received[0], rel=0.01)


def test_ddp_sends_float32_gradients_once_and_hides_them_behind_the_last_backward_pass() -> None:
    config = sizes_config(4)
    total = sum(parameter.numel() for parameter in meta_model(config).parameters())
    plan = planned(config, kind="ddp", devices=2, parts=4)
    assert plan.received == 2 * 4 * total / 2
    assert plan.overlap == pytest.approx(2 / 3 / 4)
    assert planned(config, kind="ddp", checkpointing=True).overlap == pytest.approx(3 / 4)


def test_the_cards_of_a_node_share_what_comes_from_others() -> None:
    config = sizes_config(4)
    one, eight = planned(config, devices=8), planned(config, devices=64)
    full_size = one.received * 8 / 7
    assert one.through_network == 0
    assert eight.received == pytest.approx(full_size * 63 / 64)
    assert eight.through_network == pytest.approx(full_size * 7 / 8 / 8)
    assert eight.seconds == pytest.approx(eight.through_network / 50e9)
    assert one.seconds == pytest.approx(one.received / 450e9)


def test_what_can_be_reached_at_best() -> None:
    gathers = Communication(received=100.0, through_network=0.0, overlap=1.0, link=50.0, network=None)  # 2 seconds
    assert gathers.best(0.4, computation=2.0) == 0.4
    assert gathers.best(0.4, computation=1.0) == pytest.approx(0.2)
    waits = Communication(received=100.0, through_network=0.0, overlap=0.0, link=50.0, network=None)
    assert waits.best(0.4, computation=2.0) == pytest.approx(0.2)
    unknown = Communication(received=100.0, through_network=10.0, overlap=1.0, link=50.0, network=None)
    assert unknown.seconds is None
    assert unknown.best(0.4, computation=0.1) == 0.4
