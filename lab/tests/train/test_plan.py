"""Plans: what they say and refuse, and that a step takes the memory that is planned; nothing is read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from diff_lab.data import byte_tokenizer
from diff_lab.train import Recipe, build_config, load_recipe, shipped_recipes, train
from diff_lab.train.plan import CONTEXT, GIB, GPUS, USABLE, Memory, Plan, peak_flops, vocabulary
from diff_lab.train.step import build_optimizers
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.parallel import one_rank_of, shard
from full_run import short_run
from small_runs import small_recipe

Pretend = Callable[[str], torch.device]


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
    assert without.memory.activations > 10 * checkpointing.memory.activations
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


@pytest.mark.all
def test_the_disk_of_checkpoints_is_that_of_real_ones(tmp_path: Path) -> None:
    for optimizer in ("adamw", "muon"):
        settings = ["model.hidden_size=160", f"train.optimizer={optimizer}", "train.steps=1", "train.warmup_steps=0"]
        recipe = load_recipe("tiny", settings)
        train(recipe, tmp_path / optimizer)
        (folder,) = (tmp_path / optimizer / "checkpoints").iterdir()
        real = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert Plan(recipe).checkpoint_bytes == pytest.approx(real, rel=0.03)


def test_what_each_of_several_devices_holds() -> None:
    """The shares of weights and optimizer are exact, the rest is of the right size."""
    settings = ["data.length=4096", "data.batch_size=64", "train.precision=bf16"]

    def memory(gpus: int, **overrides: Any) -> Memory:
        more = [f"train.{name}={value}" for name, value in overrides.items()]
        recipe = load_recipe("small", [*settings, f"data.batch_size={16 * gpus}", *more])
        return Plan(recipe, "h200", gpus).ways[0].memory

    alone, ddp, fsdp = memory(1), memory(4), memory(4, parallel="fsdp")
    total = Plan(load_recipe("small")).parameters
    assert alone.optimizer == ddp.optimizer == 8 * total
    assert ddp.gradients == 4 * total  # in DDP's buckets, from the beginning
    assert fsdp.optimizer == alone.optimizer / 4
    assert total < fsdp.weights < alone.weights  # its share in float32; the embedding and the head stay gathered
    assert alone.activations == ddp.activations == fsdp.activations
    accumulated = memory(4, parallel="fsdp", accumulation=2).gradients
    assert total <= accumulated < 4 * total  # its share, and of the head all for a while


def measured_peak(memory: Any, model: Any, recipe: Recipe, optimizers: list[torch.optim.Optimizer]) -> int:
    """The most bytes alive by torch's tracker in two steps: the second has the optimizer's state from the beginning."""
    tokens = torch.zeros(2, recipe.data.length, dtype=torch.long)
    with memory:
        for _ in range(2):
            for _ in range(recipe.train.accumulation):
                memory.reset_mod_stats()
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
                    model(input_ids=tokens, labels=tokens, use_cache=False, chunked_loss=True).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    peak: int = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak


def model_of(recipe: Recipe) -> DiffTransformerForCausalLM:
    model = DiffTransformerForCausalLM(build_config(recipe, vocabulary(recipe))).train()
    if recipe.train.gradient_checkpointing:  # whose new name transformers warns of where it exists
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def long_or_large(length: int, batch_size: int, hidden_size: int = 64, **train: Any) -> Recipe:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 172, "num_hidden_layers": 4, "head_dim": 8}
    data = {"length": length, "batch_size": batch_size, "num_keys": 100, "num_values": 100, "num_noise": 299}
    return small_recipe(model=sizes | {"vocab_size": 500}, data=data, **train)


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
    recipe = long_or_large(length, 2 * overrides.get("accumulation", 1), **overrides)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention_type": attention_type})})
    memory = Plan(recipe).ways[recipe.train.gradient_checkpointing].memory
    assert (memory.activations > memory.weights) == (about == "activations" and not recipe.train.gradient_checkpointing)
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")  # not promised by torch to stay
    model = model_of(recipe)
    optimizers, measured = build_optimizers(model, recipe.train), tracker.MemTracker()
    measured.track_external(model)
    assert memory.total == pytest.approx(measured_peak(measured, model, recipe, optimizers), rel=0.1)


RANKS = 4


@pytest.fixture
def _ranks() -> Iterator[None]:
    with one_rank_of(RANKS):
        yield


@pytest.mark.usefixtures("_ranks")
@pytest.mark.parametrize(
    ("length", "parts", "precision", "checkpointing"),
    short_run([(128, 1, "no", False), (128, 2, "bf16", True), (8, 2, "no", False)], [(8, 2, "no", False)]),
    ids=["activations", "checkpointing", "gradients"],
)
def test_a_rank_holds_what_the_plan_says(length: int, parts: int, precision: str, checkpointing: bool) -> None:
    tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")  # nor promised to stay
    settings = {"gradient_checkpointing": checkpointing, "accumulation": parts, "precision": precision}
    recipe = long_or_large(length, 2 * RANKS * parts, hidden_size=128, parallel="fsdp", **settings)
    planned = Plan(recipe, "h200", RANKS).ways[checkpointing].memory.total
    model = model_of(recipe)
    dtype = torch.bfloat16 if precision == "bf16" else None
    shard(model, model.model.layers, init_device_mesh("cpu", (RANKS,)), param_dtype=dtype)
    optimizers = build_optimizers(model, recipe.train)
    measured = measured_peak(tracker.FSDPMemTracker(model, *optimizers), model, recipe, optimizers)
    assert planned == pytest.approx(measured, rel=0.15)


def test_the_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    assert vocabulary(load_recipe("tiny", [f"data.tokenizer={tmp_path / 'bytes'}"])) == 257
    assert vocabulary(load_recipe("tiny")) == 257
    assert vocabulary(load_recipe("small")) == 8192
    with pytest.raises(ValueError, match=r"downloads nothing, and data\.tokenizer 'gpt2' is no folder"):
        vocabulary(load_recipe("tiny", ["data.tokenizer=gpt2"]))


@pytest.mark.parametrize("content", [None, "{", "{}"], ids=["absent", "no JSON", "empty"])
@pytest.mark.parametrize("recipe", ["tiny", "masked"])
def test_a_folder_without_a_readable_tokenizer(tmp_path: Path, recipe: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    settings = [f"data.tokenizer={tmp_path}", "data.vocab_size=null"]
    with pytest.raises(ValueError, match=rf'^data\.tokenizer is "bytes", .* and {str(tmp_path)!r} cannot be loaded: '):
        vocabulary(load_recipe(recipe, settings))


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ([], {"gpu": "v100"}, "GPU 'v100' is not known; known ones are b200, h200"),
        ([], {"gpu": "h200", "gpus": 0}, "the number of GPUs must be 1 or more, got 0"),
        ([], {"gpus": 2}, "several processes are planned for GPUs, got 2"),
        ([], {"gpu": "h200", "utilisation": 0.0}, "the utilisation must lie above 0 and not above 1, got 0.0"),
        ([], {"gpu": "h200", "utilisation": 40.0}, "the utilisation must lie above 0 and not above 1, got 40.0"),
        ([], {"gpu": "h200", "gpus": 3}, r"data\.batch_size=32 cannot be divided among 3 processes"),
        (["train.precision=fp16"], {}, "'fp16' needs a GPU"),
        (
            ["train.precision=fp16", "train.parallel=fsdp"],
            {"gpu": "h200", "gpus": 2},
            "'fp16' runs in one process or with .* 'ddp', not with",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: list[str], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(load_recipe("small", settings), **arguments)


# Peaks of devices


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    def pretend(name: str) -> torch.device:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return torch.device("cuda")

    return pretend


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(pretend: Pretend, device_name: str, name: str) -> None:
    for precision, peak in (("bf16", GPUS[name].half), ("fp16", GPUS[name].half), ("no", GPUS[name].float32)):
        assert peak_flops(pretend(device_name), precision) == peak


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA Imaginary 9", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40"],
)
def test_a_part_of_a_gpu_and_its_weaker_relatives_are_not_taken_for_it(pretend: Pretend, device_name: str) -> None:
    assert peak_flops(pretend(device_name), "bf16") is None


def test_tf32_counts_where_torch_uses_it(pretend: Pretend) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops(pretend("NVIDIA H100 PCIe"), "no") == 378e12
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak_flops(pretend("NVIDIA H100 PCIe"), "no") == 51e12


def test_every_line_is_plausible() -> None:
    """Tensor cores are never slower than what stands beside them."""
    for gpu in GPUS.values():
        assert gpu.half >= 1.9 * gpu.tf32 >= 1.9 * gpu.float32
        assert 16 < gpu.memory_gib < 256
        assert gpu.name == gpu.name.lower()


def test_the_cpu_is_measured_once() -> None:
    state = torch.get_rng_state()
    peak = peak_flops(torch.device("cpu"), "no")
    assert peak is not None
    assert 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu"), "no") == peak
    assert peak_flops(torch.device("cpu"), "fp16") is peak_flops(torch.device("meta"), "bf16") is None
    assert torch.equal(torch.get_rng_state(), state)
