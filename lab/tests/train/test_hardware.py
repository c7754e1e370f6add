"""The table of GPUs, and how a device finds its line."""

from collections.abc import Callable

import pytest
import torch

from diff_lab.train import hardware
from diff_lab.train.hardware import GPUS, gpu_named, peak_flops

Pretend = Callable[[str], torch.device]


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
    monkeypatch.setattr(hardware, "_SIZE", 128)
    monkeypatch.setattr(hardware, "_SECONDS", 0.01)
    hardware._measured.cache_clear()
    state = torch.get_rng_state()
    peak = peak_flops(torch.device("cpu"), "no")
    assert peak is not None
    assert 1e8 < peak < 1e14
    assert peak_flops(torch.device("cpu"), "no") == peak
    assert torch.equal(torch.get_rng_state(), state)
    hardware._measured.cache_clear()


def test_what_has_no_peak() -> None:
    assert peak_flops(torch.device("meta"), "bf16") is None
    assert peak_flops(torch.device("cpu"), "fp16") is None
