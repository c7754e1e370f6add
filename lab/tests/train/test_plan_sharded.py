"""The plan's memory under FSDP2, against torch's own tracker, on one of four ranks that do not really exist."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from diff_lab.train.distributed import shard
from diff_lab.train.recipe import TrainRecipe
from diff_lab.train.step import build_optimizers
from diff_lab.train.step_costs import ModelSizes, StepLayout, meta_model, planned_memory
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.ops.backends import explain

# Neither is promised by torch to stay.
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
RANKS = 4


@pytest.fixture
def _ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(
    ("length", "parts", "precision", "checkpointing"),
    [(128, 1, "no", False), (128, 2, "bf16", True), (8, 2, "no", False)],
    ids=["activations", "checkpointing", "gradients"],
)
def test_a_rank_holds_what_the_plan_says(length: int, parts: int, precision: str, checkpointing: bool) -> None:
    config = DiffTransformerConfig(
        vocab_size=2000, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=8, head_dim=16
    )
    recipe = TrainRecipe.model_validate({"steps": 1, "learning_rate": 1e-3})
    layout = StepLayout(
        kind="fsdp",
        devices=RANKS,
        sequences=2,
        length=length,
        parts=parts,
        half=precision == "bf16",
        checkpointing=checkpointing,
        backend="cpu" if explain("cpu")["cpu"] is None else "blockwise",
        on_cpu=True,
    )
    planned = planned_memory(config, ModelSizes(meta_model(config), recipe), layout).total

    model = DiffTransformerForCausalLM(config).train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    shard(model, "cpu", RANKS, precision)
    (optimizer,) = build_optimizers(model, recipe)
    tokens = torch.zeros(2, length, dtype=torch.long)
    memory = tracker.FSDPMemTracker(model, optimizer)
    memory.track_inputs((tokens,))
    with memory:
        for _ in range(2):
            for _ in range(parts):
                memory.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert planned == pytest.approx(measured, rel=0.12)
