"""Latent attention (MLA, Motif-3's GDLA) by the operator: queries meet the latents themselves, over one key head."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from budget import Case, prepared, skip_unless_it_takes
from diff_transformer import diff_attention

GROUPS, RATIO, NOPE, ROPE, RANK, DV, N, S = 2, 3, 8, 4, 16, 6, 3, 11


SHARED = Case(batch=1, heads=6, key_heads=1, ratio=3, key_maps=1, keys=17, is_causal=True, lam="full", gain=1.0)
WIDTHS = {
    "expanded": replace(SHARED, queries=5, d=192, dv=128),
    "absorbed": replace(SHARED, queries=5, d=576, dv=512),
    "absorbed, decoding": replace(SHARED, queries=1, d=576, dv=512),
}


@pytest.mark.parametrize("case", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "cpu"])
def test_keys_wider_than_values(backend: str, dtype: torch.dtype, case: str) -> None:
    skip_unless_it_takes(backend, dtype)
    problem, expected = prepared(replace(WIDTHS[case], dtype=dtype))
    expected.check(problem.solve(diff_attention, backend=backend))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_absorbed_projections_give_what_keys_and_values_give(backend: str) -> None:
    """k = [c W_uk, k_pe], v = c W_uv, of each group, and instead (q W_ukᵀ, q_pe) on [c, k_pe], whose values are c."""
    torch.manual_seed(0)
    q, lam = torch.randn(1, GROUPS, RATIO + 1, N, NOPE + ROPE).double(), torch.rand(1, GROUPS * RATIO, N).double()
    cache = torch.randn(1, S, RANK + ROPE).double()  # c and k_pe
    to_keys, to_values = torch.randn(GROUPS, RANK, NOPE).double(), torch.randn(GROUPS, RANK, DV).double()
    options = {"is_causal": True, "scale": (NOPE + ROPE) ** -0.5, "backend": backend}

    latents = cache[..., :RANK].unsqueeze(1)  # (1, 1, S, rank), a view of the cache as the values below
    k_pe = cache[..., RANK:].unsqueeze(1).expand(-1, GROUPS, -1, -1)
    keys, values = torch.cat((latents @ to_keys, k_pe), -1), latents @ to_values
    expected = diff_attention(q, keys.unsqueeze(2), values, lam, **options)

    def absorbed(x: Tensor) -> Tensor:
        inside = torch.einsum("bgrnd,gcd->bgrnc", x[..., :NOPE], to_keys)
        return torch.cat((inside, x[..., NOPE:]), -1)

    heads = diff_attention(absorbed(q), cache[:, None, None], latents, lam, **options)
    out = torch.einsum("bgrnc,gcd->bgrnd", heads.unflatten(1, (GROUPS, RATIO)), to_values).flatten(1, 2)
    assert (out - expected).abs().max() < 1e-13 * expected.abs().max()
