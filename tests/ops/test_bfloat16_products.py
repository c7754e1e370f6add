"""Which instructions multiply bfloat16: torch's answers about a processor, and what keeps it from using them."""

import pytest
import torch

from diff_transformer.ops.sdpa import multiplies_bfloat16, multiplies_with_amx

AMX, AVX512 = "_is_amx_tile_supported", "_is_avx512_bf16_supported"


@pytest.fixture(params=[AMX, AVX512])
def instruction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one instruction that the processor has, of those that torch asks for."""
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for question in (AMX, AVX512):
        monkeypatch.setattr(torch.cpu, question, lambda known=question == request.param: known, raising=False)
    only: str = request.param
    return only


def test_amx_is_one_way_of_two(instruction: str) -> None:
    assert multiplies_with_amx() is (instruction == AMX)
    assert multiplies_bfloat16()


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        ("avx2", ()),
        ("AVX512_CORE", ()),
        ("AVX512_CORE_BF16", (AVX512,)),
        ("avx512_core_fp16", (AVX512,)),
        ("avx512_core_amx", (AVX512, AMX)),
        ("DEFAULT", (AVX512, AMX)),
    ],
)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_onednn_is_held_to_a_level(
    instruction: str, variable: str, limit: str, allowed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, limit)
    assert multiplies_bfloat16() is (instruction in allowed)
    assert multiplies_with_amx() is (instruction == AMX and AMX in allowed)


@pytest.mark.usefixtures("instruction")
def test_torch_is_held_to_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # ATEN_CPU_CAPABILITY=avx2
    assert not multiplies_bfloat16()


@pytest.mark.usefixtures("instruction")
def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16()


@pytest.mark.usefixtures("instruction")
def test_onednn_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not multiplies_bfloat16()


def test_another_processor_has_neither(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, instruction, lambda: False)
    assert not multiplies_bfloat16()


def test_another_torch_has_neither(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, instruction)
    assert not multiplies_bfloat16()
