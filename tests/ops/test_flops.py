"""What torch's FlopCounterMode counts of the operator: as much as of Equation 1 in torch's own operations."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from budget import skip_unless_it_takes
from diff_transformer import SoftmaxAttention, diff_attention
from diff_transformer.nn import DiffAttention

OPAQUE = ("blockwise", "cpu", "triton")
# G, r, H_kv, maps of keys, N, S, d, dv
CASES = {
    "the paper's": (4, 1, 4, 2, 5, 7, 8, 16),
    "grouped queries, shared keys": (4, 1, 2, 1, 6, 6, 8, 8),
    "three signal heads to a noise map": (2, 3, 1, 2, 6, 9, 4, 8),
    "one query": (4, 1, 2, 2, 1, 9, 8, 16),
}


def request(case: str, **changes: Any) -> dict[str, Any]:
    groups, ratio, kv_heads, maps, n, s, d, dv = CASES[case]
    tensors = {
        "q": torch.randn(2, groups, ratio + 1, n, d, requires_grad=True),
        "k": torch.randn(2, kv_heads, maps, s, d),
        "v": torch.randn(2, kv_heads, s, dv),
    }
    return {**tensors, "lam": 0.5, "is_causal": True, **changes}


@pytest.mark.parametrize("backend", OPAQUE)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: str, backend: str) -> None:
    skip_unless_it_takes(backend, torch.float32)
    groups, ratio, _, _, n, s, d, dv = CASES[case]
    heads, pairs = groups * ratio, 2 * n * s
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        diff_attention(**request(case), backend="reference")
    with FlopCounterMode(display=False) as counter:
        out = diff_attention(**request(case), backend=backend)
    assert counter.get_total_flops() == plain.get_total_flops() == 2 * pairs * ((heads + groups) * d + heads * dv)
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (3 * (heads + groups) * d + 2 * heads * dv)


@pytest.mark.parametrize("n", [1, 9])
def test_auto_without_a_gradient(n: int) -> None:
    arguments = request("the paper's", q=torch.randn(2, 4, 2, n, 8), k=torch.randn(2, 4, 2, 9, 8))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        diff_attention(**{**arguments, "v": torch.randn(2, 4, 9, 16), "norm_weight": torch.ones(16)})
    assert counter.get_total_flops() == 2 * 2 * n * 9 * (8 * 8 + 4 * 16)


def test_a_layer_costs_what_the_transformers_does() -> None:
    """With the same parameters: the difference of two maps of width d is multiplied with values of width 2d."""
    counts = []
    for attention in (DiffAttention(96, 4, 1), SoftmaxAttention(96, 4, 1)):
        # torch does not count its own fused attention for the CPU.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            attention(torch.randn(2, 5, 96), is_causal=True)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@pytest.mark.all
def test_the_first_call_of_a_process_is_counted() -> None:
    """Though the counter is there before the kernel's library is loaded."""
    code = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from diff_transformer import diff_attention
with FlopCounterMode(display=False) as counter:
    diff_attention(torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 3, 8), 0.5)
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 * 9 * (2 * 4 + 8))]
