"""How far a reader has to go from the operator to the mathematics: the files of ours that a call enters."""

from typing import Any

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.ops import lambda_value
from diff_transformer.ops.cpu.cpu_backend import reason_against_cpu_kernel
from diff_transformer.ops.cpu.cpu_build import is_faster
from journeys import files_entered


def attend(**options: Any) -> torch.Tensor:
    q, k, v = torch.randn(1, 2, 2, 3, 8, requires_grad=True), torch.randn(1, 2, 2, 5, 8), torch.randn(1, 2, 5, 16)
    return diff_attention(q, k, v, torch.tensor(0.5), is_causal=True, **options)


def test_from_the_operator_to_equation_1() -> None:
    files = files_entered(lambda: attend(backend="reference"), "softmax_maps")
    assert len(files) <= 4, files
    masked = files_entered(
        lambda: attend(backend="reference", attn_mask=torch.ones(5, dtype=torch.bool)), "softmax_maps"
    )
    assert len(masked) <= 4, masked


@pytest.mark.skipif(not is_faster() or reason_against_cpu_kernel() is not None, reason="needs a kernel that auto takes")
@pytest.mark.parametrize(("gradients", "until"), [(True, "cpu_attention"), (False, "decode_fast_path")])
def test_from_the_operator_to_the_cpu_kernel(gradients: bool, until: str) -> None:
    with torch.set_grad_enabled(gradients):
        files = files_entered(attend, until)
    assert len(files) <= 4, files


def test_equation_2_is_one_file() -> None:
    vectors = [torch.randn(8) for _ in range(4)]
    assert files_entered(lambda: lambda_value(*vectors, 0.3), "lambda_value") == ["ops/functional.py"]
