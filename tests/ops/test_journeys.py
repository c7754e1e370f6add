"""How far a reader has to go from the operator to the mathematics: the files of ours that a call enters."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import diff_transformer
from diff_transformer import diff_attention
from diff_transformer.ops import lambda_value
from diff_transformer.ops.cpu.cpu_backend import is_faster, reason_against_cpu_kernel

ROOT = Path(diff_transformer.__file__).parent


def files_entered(call: Callable[[], object], until: str) -> list[str]:
    """Our files, in the order in which the call enters them, up to the first entry of the function ``until``."""
    entered: list[str] = []
    has_arrived = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_arrived
        path = Path(frame.f_code.co_filename)
        if has_arrived or event != "call" or not path.is_relative_to(ROOT):
            return
        name = path.relative_to(ROOT).as_posix()
        if name not in entered:
            entered.append(name)
        has_arrived = frame.f_code.co_name == until

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert has_arrived, f"{until} was not reached through {entered}"
    return entered


@pytest.fixture
def attend() -> Callable[..., Any]:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 2, 3, 8), torch.randn(1, 2, 2, 5, 8), torch.randn(1, 2, 5, 16)
    return lambda **options: diff_attention(q.requires_grad_(), k, v, torch.tensor(0.5), is_causal=True, **options)


def test_from_the_operator_to_equation_1(attend: Callable[..., Any]) -> None:
    files = files_entered(lambda: attend(backend="reference"), "softmax_maps")
    assert len(files) <= 5, files
    masked = files_entered(
        lambda: attend(backend="reference", attn_mask=torch.ones(5, dtype=torch.bool)), "softmax_maps"
    )
    assert len(masked) <= 6, masked


@pytest.mark.skipif(not is_faster() or reason_against_cpu_kernel() is not None, reason="needs a kernel that auto takes")
@pytest.mark.parametrize(("gradients", "until"), [(True, "cpu_attention"), (False, "decode_fast_path")])
def test_from_the_operator_to_the_cpu_kernel(attend: Callable[..., Any], gradients: bool, until: str) -> None:
    with torch.set_grad_enabled(gradients):
        files = files_entered(attend, until)
    assert len(files) <= 4, files


def test_equation_2_is_one_file() -> None:
    vectors = [torch.randn(8) for _ in range(4)]
    assert files_entered(lambda: lambda_value(*vectors, 0.3), "lambda_value") == ["ops/functional.py"]
