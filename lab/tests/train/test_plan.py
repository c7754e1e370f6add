"""Plans: what they say and refuse, and that a step takes the memory that is planned; nothing is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from diff_lab.train import build_config, load_recipe, shipped_recipes, train
from diff_lab.train.plan import CONTEXT, GIB, GPUS, USABLE, Counted, Layout, Plan, count, layouts, peak_flops
from diff_lab.train.step import build_optimizers
from diff_transformer.model import DiffTransformerForCausalLM
from full_run import short_run
from small_runs import small_recipe

FOUR = "model.num_hidden_layers=4"
# Of docs/cluster.md: the recipe, the ranks' layout, and the sequences at a time.
ROWS = [
    ("paper-3b", Layout(replicas=8, shards=8), 1),
    ("paper-3b", Layout(replicas=64, shards=8), 1),
    ("paper-13.1b", Layout(replicas=32, shards=4, tensor=2), 1),
    ("paper-13.1b", Layout(replicas=64, shards=2, tensor=4, context=2), 1),
    ("paper-3b-64k", Layout(replicas=4, shards=16, context=4, tensor=2), 1),
]


def counted(name: str, layout: Layout, micro_batch: int = 1, checkpointing: bool = True, *settings: str) -> Counted:
    recipe = load_recipe(name, settings)
    return count(recipe, build_config(recipe, recipe.model.vocab_size or 0), layout, micro_batch, checkpointing)


@pytest.mark.all  # the next has every kind of parallelism
def test_numbers_of_the_3b_model() -> None:
    """The paper's text and tokenizer are not here, and nobody misses them."""
    paper = Plan(load_recipe("paper-3b", [FOUR]), "h200", 64)
    assert (paper.steps, paper.tokens_per_step) == (83447, 4 << 20)
    assert paper.peak == GPUS["h200"].half
    flops = paper.steps * paper.tokens_per_step * paper.flops_per_token
    assert paper.days == pytest.approx(flops / (64 * 0.4 * 989.5e12) / 86400)
    assert paper.tokens_per_second == pytest.approx(paper.steps * paper.tokens_per_step / (paper.days * 86400))
    assert paper.device_memory == (GPUS["h200"].memory_gib * GIB - CONTEXT) * USABLE
    assert paper.chosen == paper.counted[0]
    assert (paper.chosen.layout, paper.chosen.micro_batch) == (Layout(8, 8), 4)


def test_one_rank_of_512_with_every_kind_of_parallelism() -> None:
    """Four layers of paper-3b-64k: what is divided by what, and the messages that the layout must send."""
    layout = Layout(replicas=4, shards=16, context=4, tensor=2)
    rank = counted("paper-3b-64k", layout, 1, True, FOUR)
    assert rank.weights == pytest.approx(4 * 761_100_288 / 128, rel=0.02)
    assert (rank.gradients, rank.optimizer) == pytest.approx((rank.weights, 2 * rank.weights), rel=0.01)
    numbers = {kind: number for kind, (number, _) in rank.messages.items()}
    # FSDP2: two gathers a layer and one for the rest, a sum for each unit, and another between the replicas.
    assert (numbers["allgather of 64"], numbers["reduce_scatter of 64"], numbers["allreduce of 4"]) == (9, 5, 5)
    # CP: keys and values of a layer, gathered twice as the layer is computed twice, and their gradients.
    assert (numbers["allgather of 4"], numbers["reduce_scatter of 4"]) == (16, 8)
    _, sent = rank.messages["allgather of 4"]
    assert sent == 16 * 65536 * 1536 * 2  # k or v of 12 of 24 heads of 128, in bfloat16
    assert numbers["allgather of 2"] > 4 * 4  # TP: the hidden states before attention and feed-forward network
    # The gradients of q, k, v are summed as a part of each rank's positions; summed whole they would be gigabytes.
    assert rank.messages["allreduce of 2"][1] < rank.messages["reduce_scatter of 2"][1] / 10


def test_a_rank_holds_its_part_of_what_one_holds() -> None:
    def held(layout: Layout, checkpointing: bool = False) -> Counted:
        settings = ("train.precision=bf16", "model.vocab_size=512", "model.num_hidden_layers=2")
        return counted("small", layout, 4, checkpointing, *settings)

    alone, ddp, sharded = held(Layout()), held(Layout(replicas=4)), held(Layout(shards=4))
    assert (alone.weights, alone.optimizer) == (ddp.weights, ddp.optimizer)
    assert alone.messages == {}
    assert [size for _, size in ddp.messages.values()] == [ddp.gradients]
    assert sharded.weights == pytest.approx(alone.weights / 4, rel=0.01)
    assert sharded.optimizer == pytest.approx(alone.optimizer / 4, rel=0.01)
    assert held(Layout(), checkpointing=True).activations < 0.6 * alone.activations
    # DTensor finds an operator's shapes on whole tensors at its first call in a process: no rank holds them.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    first = held(Layout(tensor=2))
    assert held(Layout(tensor=2)) == first


def test_the_first_layout_that_fits_is_chosen() -> None:
    planned = Plan(load_recipe("paper-1.4b", [FOUR, "model.vocab_size=1000", "train.accumulation=2"]), "l4")
    *refused, chosen = planned.counted
    assert planned.chosen == chosen
    assert [(each.micro_batch, each.checkpointing) for each in refused] == [(64, False), (64, True)]
    assert (chosen.micro_batch, chosen.checkpointing) == (1, True)
    assert not any(planned.fits(each) for each in refused)
    nowhere = Plan(load_recipe("paper-13.1b", [FOUR]), "l4")
    assert nowhere.chosen is None
    assert all(each.activations == 0 for each in nowhere.counted)  # the weights alone are too much


def test_more_gpus_than_sequences_share_them() -> None:
    """128 sequences on 256 GPUs; 20 heads cannot be divided among 8."""
    recipe = load_recipe("paper-13.1b")
    tried = list(layouts(256, recipe))
    assert tried[0] == Layout(replicas=32, shards=4, tensor=2)
    assert {each.context * each.tensor for each in tried} == {2, 4, 8}
    with pytest.raises(ValueError, match="8 ranks cannot share evenly"):
        counted("paper-13.1b", Layout(tensor=8), 1, True, FOUR)


@pytest.mark.parametrize(("name", "layout", "micro_batch"), short_run(ROWS, []))
def test_the_table_of_the_documentation(name: str, layout: Layout, micro_batch: int) -> None:
    rank = counted(name, layout, micro_batch)
    groups = ", ".join(f"{number} {kind} {size / GIB:.2f}" for kind, (number, size) in sorted(rank.messages.items()))
    held = f"{(rank.total - rank.activations) / GIB:.2f} | {rank.total / GIB:.1f}"
    row = f"| {name} | {layout} | {held} | {groups} |"
    page = Path(__file__).parents[3] / "docs" / "cluster.md"
    assert row in page.read_text(encoding="utf-8").splitlines(), row


@pytest.mark.all
@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("paper")])
def test_each_paper_recipe_fits_what_its_comment_names(name: str) -> None:
    """Both twins; on the GPUs of the command in the recipe's heading."""
    heading = shipped_recipes()[name].read_text().partition("\nname:")[0]
    command = next(line for line in heading.splitlines() if "diff-lab plan" in line).split()
    gpus, gpu = int(command[command.index("--gpus") + 1]), command[command.index("--gpu") + 1]
    for attention_type in ("diff", "softmax"):
        assert Plan(load_recipe(name, [f"model.attention_type={attention_type}"]), gpu, gpus).chosen is not None


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.all)])
def test_the_disk_of_checkpoints_is_that_of_real_ones(tmp_path: Path, optimizer: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 16}
    recipe = small_recipe(model=sizes, steps=1, optimizer=optimizer)
    train(recipe, tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    real = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert Plan(recipe).checkpoint_bytes == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "length", "settings"),
    [
        pytest.param("diff", 256, {}, marks=pytest.mark.all),
        pytest.param("softmax", 8, {"optimizer": "muon"}, marks=pytest.mark.all),
        ("diff", 256, {"gradient_checkpointing": True}),
        pytest.param("diff", 256, {"accumulation": 2, "precision": "bf16"}, marks=pytest.mark.all),
    ],
    ids=["activations", "weights", "checkpointing", "bf16"],
)
def test_the_peak_of_a_step(kind: str, length: int, settings: dict[str, Any]) -> None:
    """The most bytes alive by torch's tracker in two steps: the second has the optimizer's state from the beginning."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")  # not promised by torch to stay
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 500}
    data = {"length": length, "batch_size": 2 * settings.get("accumulation", 1), "num_keys": 100, "num_values": 100}
    recipe = small_recipe(model=sizes | {"attention_type": kind}, data=data | {"num_noise": 299}, **settings)
    model = DiffTransformerForCausalLM(build_config(recipe, 500)).train()
    if recipe.train.gradient_checkpointing:  # whose new name transformers warns of where it exists
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizers, memory = build_optimizers(model, recipe.train), tracker.MemTracker()
    memory.track_external(model)
    tokens = torch.zeros(2, length, dtype=torch.long)
    with memory:
        for _ in range(2):
            for _ in range(recipe.train.accumulation):
                memory.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
                    model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    measured = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    planned = Plan(recipe)
    assert planned.counted[0].total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ([], {"gpu": "v100"}, "GPU 'v100' is not known; known ones are b200, h200"),
        ([], {"gpus": 2}, "several processes are planned for GPUs, got 2"),
        ([], {"gpu": "h200", "gpus": 3}, r"data\.batch_size=32 and the model cannot be divided among 3 GPUs"),
        (["data.tokenizer=gpt2", "data.vocab_size=null"], {}, "give the tokens of 'gpt2' as model.vocab_size"),
        (["train.precision=fp16"], {}, "'fp16' trains nothing any more: it is 'bf16', or 'no' for float32"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: list[str], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(load_recipe("small", settings), **arguments)


@pytest.mark.parametrize(
    ("device_name", "bf16", "float32"),
    [
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        # Unknown, a part of a GPU, a weaker relative.
        ("NVIDIA Imaginary 9", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(
    device_name: str, bf16: float | None, float32: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    assert [peak_flops(torch.device("cuda"), precision) for precision in ("bf16", "no")] == [bf16, float32]
    assert peak_flops(torch.device("cpu"), "bf16") is None
