"""The same inputs give the same bits, in a process's first call and in later ones, whatever has been loaded by then."""

import pytest

import fresh

# N and S: what the CPU kernel answers in one step, as in decoding, and what it takes in blocks of queries.
SHAPES = [(1, 37), (4, 37), (80, 80)]
CALLS = """
import sys
import torch
from diff_transformer import diff_attention

n, s, dtype = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
torch.manual_seed(0)
q, k, v = (torch.randn(shape).to(dtype) for shape in ((1, 4, 2, n, 48), (1, 4, 2, s, 48), (1, 4, s, 96)))
lam, weight = torch.tensor(0.3), torch.rand(96)

def call(lam=lam, **changes):
    return diff_attention(q, k, v, lam, is_causal=True, norm_weight=weight, norm_scale=0.7, **changes)

with torch.no_grad():
    first = call()
    same = {
        "the second call": call(),
        "λ as a number": call(0.3),
        "λ for each head": call(torch.full((4, 1), 0.3)),
        "a scale of one's own": call(scale=48**-0.5),
        "a mask that hides nothing": call(attn_mask=torch.ones(s, dtype=torch.bool)),
        "a mask that could learn": call(attn_mask=torch.zeros(s, requires_grad=True)),
        "a mask in float64": call(attn_mask=torch.zeros(s, dtype=torch.float64)),
    }
same["gradients switched on"] = call()
if n > 4:  # for fewer queries, what the backward needs comes from another kernel
    same["a gradient of q"] = call() if q.requires_grad_() is q else None
for name, out in same.items():
    if not torch.equal(out, first):
        print(name, float((out - first).abs().max()))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("n", "s"), SHAPES)
def test_the_operator(n: int, s: int, dtype: str) -> None:
    done = fresh.run(CALLS, n, s, dtype)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
