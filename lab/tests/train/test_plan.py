"""Plans: what they say, and what they refuse; nothing is read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diff_lab.data import byte_tokenizer
from diff_lab.train import load_recipe, shipped_recipes, train
from diff_lab.train import plan as module
from diff_lab.train.plan import CONTEXT, GIB, GPUS, USABLE, Plan, backend, gpu_named, peak_flops, vocabulary
from diff_lab.train.recipe import build_config
from full_run import short_run

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
        settings = ["model.hidden_size=160", f"train.optimizer={optimizer}", "train.steps=2", "train.warmup_steps=0"]
        recipe = load_recipe("tiny", [*settings, "train.checkpoint_every=1"])
        train(recipe, tmp_path / optimizer)
        (newest, older) = (tmp_path / optimizer / "checkpoints").iterdir()
        planned = Plan(recipe)
        for folder in (newest, older):
            real = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            assert planned.checkpoint_bytes == pytest.approx(real, rel=0.03)


def test_how_many_train_together() -> None:
    small = load_recipe("small")
    assert Plan(small, "l4").kind == "single"
    assert Plan(small, "l4", 4).kind == "ddp"
    assert Plan(load_recipe("small", ["train.parallel=fsdp"]), "l4", 4).kind == "fsdp"
    tensor = Plan(load_recipe("small", ["train.parallel=tensor"]), "l4", 4)
    assert (tensor.kind, tensor.micro_batch) == ("tensor", 4 * Plan(small, "l4", 4).micro_batch)


def test_a_plan_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "peak_flops", lambda device, precision: 1e11)
    planned = Plan(load_recipe("retrieval"))
    assert (planned.device, planned.kind, planned.peak) == ("cpu", "single", 1e11)
    assert planned.device_memory is not None
    assert planned.ways[0].fits
    monkeypatch.delattr(os, "sysconf")  # as on Windows
    unknown = Plan(load_recipe("retrieval")).ways[0]
    assert (unknown.fits, unknown.accumulation) == (None, None)


def test_the_backend_is_what_would_be_chosen() -> None:
    config = build_config(load_recipe("paper-3b"), 100)
    wide = build_config(load_recipe("small", ["model.head_dim=256"]), 100)
    assert backend(config, GPUS["h200"], half=True, packed=True) == "triton"
    assert backend(config, GPUS["mi300x"], half=True, packed=True) == "sdpa"
    assert backend(wide, GPUS["h200"], half=True, packed=True) == "sdpa"
    softmax = build_config(load_recipe("paper-3b", ["model.attention_type=softmax"]), 100)
    assert backend(softmax, GPUS["h200"], half=True, packed=True) == "sdpa"
    assert backend(softmax, GPUS["h200"], half=False, packed=True) == "document"
    assert backend(softmax, None, half=True, packed=True) == "document"
    assert backend(softmax, None, half=False, packed=False) == "sdpa"


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
    ("arguments", "message"),
    [
        ({"gpu": "v100"}, "GPU 'v100' is not known; known ones are b200, h200"),
        ({"gpu": "h200", "gpus": 0}, "the number of GPUs must be 1 or more, got 0"),
        ({"gpus": 2}, "several processes are planned for GPUs, got 2"),
        ({"gpu": "h200", "utilisation": 0.0}, "the utilisation must lie above 0 and not above 1, got 0.0"),
        ({"gpu": "h200", "utilisation": 40.0}, "the utilisation must lie above 0 and not above 1, got 40.0"),
        ({"gpu": "h200", "gpus": 3}, r"data\.batch_size=32 cannot be divided among 3 processes"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(load_recipe("small"), **arguments)  # type: ignore[arg-type]  # the wrong ones are meant


def test_what_training_refuses_is_not_planned() -> None:
    recipe = load_recipe("small", ["train.precision=fp16"])
    with pytest.raises(ValueError, match="'fp16' needs a GPU"):
        Plan(recipe)
    assert Plan(recipe, "h200", 2).precision == "fp16"
    for settings, gpus, message in (
        (["train.precision=fp16", "train.parallel=fsdp"], 2, r"'fp16' runs in one process or with .* 'ddp', not with"),
        (["train.parallel=tensor"], 3, "which 3 ranks cannot share evenly"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan(load_recipe("small", settings), "h200", gpus)


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
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
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


def test_names_as_people_write_them() -> None:
    assert gpu_named("H200") is GPUS["h200"]
    assert gpu_named("RTX 4090") is gpu_named("rtx_4090") is GPUS["rtx-4090"]
    with pytest.raises(ValueError, match="GPU 'v100' is not known; known ones are b200, h200, "):
        gpu_named("v100")


def test_every_line_is_plausible() -> None:
    """Tensor cores are never slower than what stands beside them, and no name is taken for two lines."""
    for gpu in GPUS.values():
        assert gpu.half >= 1.9 * gpu.tf32 >= 1.9 * gpu.float32
        assert 16 < gpu.memory_gib < 256
        example = gpu.device_names.partition("(")[0]
        assert gpu.name == gpu.name.lower()
        assert example.startswith(("NVIDIA", "AMD"))


def test_the_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZE", 128)
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    module._measured.cache_clear()
    state = torch.get_rng_state()
    peak = peak_flops(torch.device("cpu"), "no")
    assert peak is not None
    assert 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu"), "no") == peak
    assert peak_flops(torch.device("cpu"), "fp16") is peak_flops(torch.device("meta"), "bf16") is None
    assert torch.equal(torch.get_rng_state(), state)
    module._measured.cache_clear()
