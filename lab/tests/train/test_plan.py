"""Plans: what they say and refuse, and that a step takes the memory that is planned; nothing is read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diff_lab.train import build_config, load_recipe, shipped_recipes, train
from diff_lab.train.plan import CONTEXT, GIB, GPUS, USABLE, Memory, Plan, peak_flops
from diff_lab.train.step import build_optimizers
from diff_transformer.model import DiffTransformerForCausalLM
from full_run import short_run
from small_runs import small_recipe


@pytest.fixture(scope="module")
def paper() -> Plan:
    """The paper's text and tokenizer are not here, and nobody misses them."""
    return Plan(load_recipe("paper-3b"), "h200", 64)


def test_numbers_of_the_3b_model(paper: Plan) -> None:
    assert paper.kind == "fsdp"
    assert paper.parameters == 3_479_175_168
    assert (paper.steps, paper.tokens_per_step, paper.micro_batch) == (83447, 4 << 20, 4)
    assert paper.peak == GPUS["h200"].half
    flops = paper.steps * paper.tokens_per_step * paper.flops_per_token
    assert paper.days == pytest.approx(flops / (64 * 0.4 * 989.5e12) / 86400)
    assert paper.tokens_per_second == pytest.approx(paper.steps * paper.tokens_per_step / (paper.days * 86400))
    assert 3 < paper.days < 5
    assert paper.device_memory == (GPUS["h200"].memory_gib * GIB - CONTEXT) * USABLE


def test_checkpointing_saves_activations_and_lets_larger_parts_fit(paper: Plan) -> None:
    without, checkpointing = paper.ways
    assert (without.checkpointing, checkpointing.checkpointing) == (False, True)
    assert without.memory.activations > 5 * checkpointing.memory.activations
    assert without.fits
    assert checkpointing.fits
    assert (without.accumulation, without.micro_batch) == (4, 4)
    assert (checkpointing.accumulation, checkpointing.micro_batch) == (1, 16)


def test_the_accumulation_that_is_named_is_the_smallest_that_fits() -> None:
    recipe = load_recipe("paper-1.4b", ["train.accumulation=16"])
    way = Plan(recipe, "a100-40", 1).ways[1]
    assert way.accumulation is not None
    as_named = Plan(load_recipe("paper-1.4b", [f"train.accumulation={way.accumulation}"]), "a100-40").ways[1]
    halved = Plan(load_recipe("paper-1.4b", [f"train.accumulation={way.accumulation // 2}"]), "a100-40").ways[1]
    assert as_named.fits
    assert not halved.fits
    assert way.micro_batch == recipe.data.batch_size // way.accumulation
    for nowhere in Plan(load_recipe("paper-13.1b"), "l4").ways:
        assert (nowhere.fits, nowhere.accumulation, nowhere.micro_batch) == (False, None, None)


@pytest.mark.parametrize(
    "name", short_run([name for name in shipped_recipes() if name.startswith("paper")], ["paper-3b"])
)
def test_each_paper_recipe_fits_what_its_comment_names(name: str) -> None:
    """Both twins; on the GPUs of the command in the recipe's heading."""
    heading = shipped_recipes()[name].read_text().partition("\nname:")[0]
    command = next(line for line in heading.splitlines() if "diff-lab plan" in line).split()
    gpus, gpu = int(command[command.index("--gpus") + 1]), command[command.index("--gpu") + 1]
    for attention_type in ("diff", "softmax"):
        planned = Plan(load_recipe(name, [f"model.attention_type={attention_type}"]), gpu, gpus)
        assert planned.ways[planned.checkpointing].fits, name


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.all)])
def test_the_disk_of_checkpoints_is_that_of_real_ones(tmp_path: Path, optimizer: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 344, "head_dim": 16}
    recipe = small_recipe(model=sizes, steps=1, optimizer=optimizer)
    train(recipe, tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    real = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert Plan(recipe).checkpoint_bytes == pytest.approx(real, rel=0.05)


def test_what_each_of_several_devices_holds() -> None:
    def memory(gpus: int, *settings: str) -> Memory:
        recipe = load_recipe("small", [f"data.batch_size={16 * gpus}", "train.precision=bf16", *settings])
        return Plan(recipe, "h200", gpus).ways[0].memory

    alone, ddp, fsdp = memory(1), memory(4), memory(4, "train.parallel=fsdp")
    total = Plan(load_recipe("small")).parameters
    assert alone == ddp
    assert (alone.optimizer, alone.gradients) == (8 * total, 4 * total)
    assert (fsdp.optimizer, fsdp.gradients) == (2 * total, total)
    assert total < fsdp.weights < alone.weights  # its share in float32; the embedding and the head stay gathered
    assert alone.activations == fsdp.activations


@pytest.mark.parametrize(
    ("kind", "length", "settings"),
    [
        ("diff", 256, {}),
        ("softmax", 8, {"optimizer": "muon"}),
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
    assert Plan(recipe).ways[recipe.train.gradient_checkpointing].memory.total == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ([], {"gpu": "v100"}, "GPU 'v100' is not known; known ones are b200, h200"),
        ([], {"gpus": 2}, "several processes are planned for GPUs, got 2"),
        ([], {"gpu": "h200", "gpus": 3}, r"data\.batch_size=32 cannot be divided among 3 processes"),
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
