"""Whether torch multiplies bfloat16 with AMX: its answers about a processor, and what keeps it from using them."""

import pytest
import torch

from diff_transformer.ops.sdpa import multiplies_with_amx

AMX = "_is_amx_tile_supported"


@pytest.fixture(autouse=True)
def _processor_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, AMX, lambda: True, raising=False)


def test_it_does() -> None:
    assert multiplies_with_amx()


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        ("avx2", False),
        ("AVX512_CORE", False),
        ("AVX512_CORE_BF16", False),
        ("avx512_core_fp16", False),
        ("avx512_core_amx", True),
        ("DEFAULT", True),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_onednn_is_held_to_a_level(variable: str, limit: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, limit)
    assert multiplies_with_amx() is allowed


def test_torch_is_held_to_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # ATEN_CPU_CAPABILITY=avx2
    assert not multiplies_with_amx()


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_with_amx()


def test_onednn_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not multiplies_with_amx()


def test_another_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, AMX, lambda: False)
    assert not multiplies_with_amx()


def test_another_torch_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, AMX)
    assert not multiplies_with_amx()
