"""The sdpa backend picks the variant of Appendix A that keeps torch on a fused kernel."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from budget import Case, build, expect
from diff_transformer import diff_attention
from diff_transformer.ops import sdpa


def calls(monkeypatch: pytest.MonkeyPatch, case: Case) -> list[tuple[int, int]]:
    """(d, dv) of every call to torch's attention that one request makes."""
    seen = []
    attend = F.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((k.shape[-1], v.shape[-1]))
        return attend(q, k, v, **options)

    problem = build(case)
    expected = expect(problem)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        expected.check(problem.solve(diff_attention, backend="sdpa"))
    return seen


@pytest.mark.parametrize(
    ("dv", "pieces"), [(4, [4]), (8, [4, 4]), (12, [4, 4, 4]), (10, [4, 4, 4]), (3, [4]), (1, [4])], ids=str
)
def test_values_in_pieces_of_width_d_where_the_kernel_wants_that(
    monkeypatch: pytest.MonkeyPatch, dv: int, pieces: list[int]
) -> None:
    monkeypatch.setattr(sdpa, "wide_values_allowed", lambda *_: False)
    assert calls(monkeypatch, Case(d=4, dv=dv, is_causal=True)) == 2 * [(4, piece) for piece in pieces]


@pytest.mark.parametrize("dv", [4, 8, 10, 3])
def test_one_call_a_map_where_the_kernel_takes_other_widths(monkeypatch: pytest.MonkeyPatch, dv: int) -> None:
    monkeypatch.setattr(sdpa, "wide_values_allowed", lambda *_: True)
    assert calls(monkeypatch, Case(d=4, dv=dv, is_causal=True)) == 2 * [(4, dv)]


@pytest.mark.parametrize("mask", [None, "bool (B, 1, 1, S)", "add -inf (B, 1, N, S)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_variant_chosen_here_runs_fused(dtype: torch.dtype, mask: str | None, key_heads: int) -> None:
    """On the CPU the fused kernel wants dv = d; answering with torch's plain formula would be the wrong choice."""
    problem = build(Case(heads=4, key_heads=key_heads, d=8, dv=16, is_causal=True, mask=mask, dtype=dtype))
    with torch.profiler.profile() as profile:
        diff_attention(problem.q, problem.k, problem.v, problem.lam, **problem.options, backend="sdpa")
    names = Counter(event.name for event in profile.events())
    assert names["aten::_scaled_dot_product_flash_attention_for_cpu"] == 4
    assert names["aten::_scaled_dot_product_attention_math"] == 0
