"""The formula for what autograd keeps, against the tensors that it saves; the peak of a step against what is alive.

Under FSDP2 it is torch's own tracker that counts, on one of four ranks that do not really exist.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diff_lab.train.distributed import shard
from diff_lab.train.plan import (
    Memory,
    StepLayout,
    WeightCounts,
    ends_bytes,
    layer_bytes,
    loss_bytes,
    meta_model,
    planned_memory,
)
from diff_lab.train.recipe import TrainRecipe
from diff_lab.train.step import build_optimizers
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.chunked_loss import chunked_cross_entropy
from diff_transformer.ops.backends import explain
from full_run import short_run

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_noise_heads": 2,
    "head_dim": 6,
}
BATCH, LENGTH = 2, 16
TOKENS = BATCH * LENGTH
# The fused kernels' operators say what they keep wherever they run: here, in triton's interpreter.
TRITON = ("diff", "diff_grouped", "diff_v2") if explain("cpu")["triton"] is None else ()
CPU = "cpu" if explain("cpu")["cpu"] is None else "blockwise"


def model_of(layers: int, attention_type: str, backend: str, **settings: Any) -> DiffTransformerForCausalLM:
    config = DiffTransformerConfig(**{**SIZES, **settings}, num_hidden_layers=layers, attention_type=attention_type)
    if config.spec.differential:
        config._attn_implementation = f"diff_attention_{backend}"
    return DiffTransformerForCausalLM(config).train()


def saved_bytes(
    model: DiffTransformerForCausalLM, half: bool, packed: bool = False, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes of all storages that autograd saves while the layers run, the parameters' aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # held, so that no address is used twice
        return tensor

    tokens, ends = torch.zeros(BATCH, LENGTH, dtype=torch.long), torch.tensor([0, 5, TOKENS])
    inputs = {"input_ids": tokens}
    if packed:  # documents in one row
        inputs = {"input_ids": tokens.view(1, -1), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype, enabled=half):
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in parameters)


def enable_checkpointing(model: DiffTransformerForCausalLM) -> None:
    """As the loop does: transformers renamed it within version 5, and the old name warns where the new one exists."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


CASES = [
    ("diff", CPU), ("diff", "blockwise"), ("diff", "sdpa"), *((kind, "triton") for kind in TRITON),
    ("diff_grouped", CPU), ("diff_grouped", "blockwise"),
    ("diff_v2", CPU), ("diff_v2", "sdpa"), ("softmax", "sdpa"), ("softmax", "document"), ("dex", "sdpa"),
]  # fmt: skip
# The headwise norm where the type has none, and none where it has one.
ABLATIONS = [("diff", CPU, False), ("diff", "sdpa", False), ("softmax", "sdpa", True), ("softmax", "document", True)]
ABLATIONS += [("diff_v2", CPU, True), *((kind, "triton", kind == "diff_v2") for kind in TRITON)]
EVERY = [*((*case, None) for case in CASES), *ABLATIONS]


@pytest.mark.parametrize(
    ("attention_type", "backend", "norm"), short_run(EVERY, [("diff", CPU, None), ("softmax", "sdpa", True)])
)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_a_layer_keeps_what_the_formula_says(attention_type: str, backend: str, norm: bool | None, half: bool) -> None:
    # The formula is of torch's attention on a GPU: that of a CPU repeats keys and values for grouped queries.
    heads = {"num_key_value_heads": 8} if backend == "sdpa" and attention_type.startswith("diff") else {}
    one, two = (model_of(layers, attention_type, backend, headwise_norm=norm, **heads) for layers in (1, 2))
    packed = backend == "document"
    dtype = torch.float16 if backend == "triton" else torch.bfloat16  # which triton's interpreter does not multiply
    measured = saved_bytes(two, half, packed, dtype) - saved_bytes(one, half, packed, dtype)
    # Autocast's copies of the weights are the weights' in the plan: they do not grow with the tokens.
    copies = 2 * WeightCounts(one, settings()).layer_linear if half else 0
    if one.config.spec.corrects_heads:  # λ·W_D as the heads take it, and λ's two factors
        copies += 8 * 6**2 * (2 if half else 4) + 2 * 4
    assert measured - copies == pytest.approx(TOKENS * layer_bytes(one.config, backend, half), rel=1e-3)


def test_packed_documents_add_next_to_nothing_to_a_layer() -> None:
    one, two = (model_of(layers, "diff", CPU) for layers in (1, 2))
    added = saved_bytes(two, False, packed=True) - saved_bytes(one, False, packed=True)
    assert added == pytest.approx(TOKENS * layer_bytes(one.config, CPU, False), rel=5e-3)


@pytest.mark.parametrize(("attention_type", "backend"), [("diff", CPU), ("softmax", "sdpa")])
def test_what_is_kept_outside_the_layers(attention_type: str, backend: str) -> None:
    model = model_of(1, attention_type, CPU)
    outside = saved_bytes(model, False) - TOKENS * layer_bytes(model.config, backend, False)
    # The tables of the rotary embedding are made once for all rows of a batch, unless documents begin anew in them.
    tables = 2 * (BATCH - 1) * LENGTH * SIZES["head_dim"] * 4
    assert outside == pytest.approx(TOKENS * ends_bytes(model.config) - tables, rel=5e-3)


def test_with_checkpointing_a_layer_keeps_its_input() -> None:
    one, three = model_of(1, "diff", CPU), model_of(3, "diff", CPU)
    for model in (one, three):
        enable_checkpointing(model)
    assert (saved_bytes(three, True) - saved_bytes(one, True)) / 2 == TOKENS * SIZES["hidden_size"] * 4


def settings(**overrides: Any) -> TrainRecipe:
    return TrainRecipe.model_validate({"steps": 1, "learning_rate": 1e-3, **overrides})


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are made under it, as long as they live, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        return result

    def watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.known:
            return
        self.known.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def most_alive(model: DiffTransformerForCausalLM, recipe: TrainRecipe, sequences: int, length: int) -> int:
    """Bytes of tensors at the peak of the second step of training, weights included."""
    optimizers = build_optimizers(model, recipe)
    tokens = torch.zeros(sequences, length, dtype=torch.long)
    alive = Alive()
    with alive:
        for parameter in model.parameters():
            alive.watch(parameter)
        for _ in range(2):
            for _ in range(recipe.accumulation):
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.precision == "bf16"):
                    model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return alive.most


@pytest.mark.parametrize(
    ("about", "overrides", "length"),
    [
        ("activations", {}, 256),
        ("weights", {}, 8),
        ("activations", {"gradient_checkpointing": True}, 256),
        ("weights", {"gradient_checkpointing": True}, 48),
        ("activations", {"accumulation": 2, "precision": "bf16"}, 256),
        ("weights", {"optimizer": "muon"}, 8),
    ],
)
@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_the_peak_of_a_step(attention_type: str, about: str, overrides: dict[str, Any], length: int) -> None:
    recipe, sequences = settings(**overrides), 2
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 172, "head_dim": 8, "num_key_value_heads": 8}
    model = model_of(4, attention_type, CPU, **sizes)
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    layout = layout_of(
        sequences=sequences,
        length=length,
        parts=recipe.accumulation,
        half=recipe.precision != "no",
        checkpointing=recipe.gradient_checkpointing,
    )
    planned = planned_memory(model.config, WeightCounts(model, recipe), layout)
    assert (planned.activations > planned.weights) == (about == "activations" and not recipe.gradient_checkpointing)
    assert planned.total == pytest.approx(most_alive(model, recipe, sequences, length), rel=0.04)


def test_the_loss_holds_what_the_formula_says() -> None:
    model = model_of(1, "softmax", CPU, vocab_size=3000)
    hidden = torch.randn(1, 4000, SIZES["hidden_size"], requires_grad=True)
    labels = torch.zeros(1, 4000, dtype=torch.long)
    alive = Alive()
    # They are there before, and views of them are made.
    alive.known |= {given.untyped_storage()._cdata for given in (hidden, model.lm_head.weight)}
    with alive:
        chunked_cross_entropy(model.lm_head, hidden, labels, 3000).backward()
    assert loss_bytes(model.config, 4000, False, on_cpu=True) == pytest.approx(alive.most, rel=0.02)


def layout_of(**overrides: Any) -> StepLayout:
    usual: dict[str, Any] = {"kind": "single", "devices": 1, "sequences": 4, "length": 64, "parts": 1}
    usual |= {"half": False, "checkpointing": False, "backend": CPU, "on_cpu": True}
    return StepLayout(**{**usual, **overrides})


def test_what_each_of_several_devices_holds() -> None:
    """Reasoned, not measured: the shares of weights and optimizer are exact, the rest is of the right size."""
    config = DiffTransformerConfig(**{**SIZES, "vocab_size": 4096}, num_hidden_layers=6)
    sizes = WeightCounts(meta_model(config), settings())

    def memory(**overrides: Any) -> Memory:
        return planned_memory(config, sizes, layout_of(half=True, backend="triton", on_cpu=False, **overrides))

    alone, ddp = memory(), memory(kind="ddp", devices=4)
    fsdp, tensor = memory(kind="fsdp", devices=4), memory(kind="tensor", devices=4)
    assert alone.optimizer == ddp.optimizer == 8 * sizes.total
    assert ddp.gradients == 4 * sizes.total  # in DDP's buckets, from the beginning
    assert fsdp.optimizer == alone.optimizer / 4
    assert fsdp.weights == sizes.total + 4 * sizes.ends  # its share in float32; the ends stay gathered
    assert alone.activations == ddp.activations == fsdp.activations > tensor.activations > alone.activations / 4
    assert fsdp.optimizer < tensor.optimizer < alone.optimizer
    accumulated = memory(kind="fsdp", devices=4, parts=2).gradients
    assert sizes.total <= accumulated <= sizes.total + 4 * sizes.ends  # its share, and of the ends all for a while


def test_nothing_takes_memory_on_the_meta_device() -> None:
    model = meta_model(DiffTransformerConfig(**SIZES, num_hidden_layers=2))
    counted = WeightCounts(model, settings(optimizer="muon"))
    assert counted.total == model.num_parameters()
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert counted.state == 4 * matrices + 8 * (counted.total - matrices)


RANKS = 4


@pytest.fixture
def _ranks() -> Iterator[None]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")  # not promised by torch to stay
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(
    ("length", "parts", "precision", "checkpointing"),
    short_run([(128, 1, "no", False), (128, 2, "bf16", True), (8, 2, "no", False)], [(8, 2, "no", False)]),
    ids=["activations", "checkpointing", "gradients"],
)
def test_a_rank_holds_what_the_plan_says(length: int, parts: int, precision: str, checkpointing: bool) -> None:
    tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")  # nor this
    sizes = {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 344, "num_key_value_heads": 8, "head_dim": 16}
    model, half = model_of(4, "diff", CPU, **sizes), precision == "bf16"
    layout = layout_of(
        kind="fsdp", devices=RANKS, sequences=2, length=length, parts=parts, half=half, checkpointing=checkpointing
    )
    planned = planned_memory(model.config, WeightCounts(model, settings()), layout).total
    if checkpointing:
        enable_checkpointing(model)
    shard(model, "cpu", RANKS, precision)
    (optimizer,) = build_optimizers(model, settings())
    tokens = torch.zeros(2, length, dtype=torch.long)
    memory = tracker.FSDPMemTracker(model, optimizer)
    memory.track_inputs((tokens,))
    with memory:
        for _ in range(2):
            for _ in range(parts):
                memory.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    measured = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert planned == pytest.approx(measured, rel=0.12)
