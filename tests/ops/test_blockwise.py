"""What the blockwise backend promises beyond the right numbers: memory linear in N, and hidden blocks left alone."""

import textwrap
from pathlib import Path

import pytest
import torch

import fresh
from diff_transformer import diff_attention
from diff_transformer.ops import blockwise


@pytest.mark.parametrize("layout", ["side by side", "apart"])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_heads_taken_together_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, size: int, layout: str) -> None:
    batch, heads, key_heads, n = 3, 6, 3, 10
    monkeypatch.setattr(blockwise, "CORE_SCORES", size * heads // key_heads * n * n)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    if layout == "apart":
        q, k = torch.randn(batch, heads, 2, n, 4), torch.randn(batch, key_heads, 2, n, 4)
        v = torch.randn(batch, key_heads, n, 8)
    else:
        q = torch.randn(batch, n, heads, 2, 4).permute(0, 2, 3, 1, 4)
        k = torch.randn(batch, n, key_heads, 2, 4).permute(0, 2, 3, 1, 4)
        v = torch.randn(batch, n, key_heads, 8).transpose(1, 2)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.rand(batch, heads, n))]
    mask = torch.randn(batch, heads, n, n)
    results = []
    for backend in ("blockwise", "reference"):
        out = diff_attention(*leaves, attn_mask=mask, is_causal=True, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


def test_memory_is_linear() -> None:
    """4,096 tokens, forward and backward: one map alone, 4,096² numbers, would be 64 MiB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    program = """
        import torch
        from diff_transformer import diff_attention

        def peak():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

        def run(n):
            q, k = torch.randn(2, 1, 4, 2, n, 16).unbind()
            q, k, v = (x.requires_grad_() for x in (q, k, torch.randn(1, 4, n, 32)))
            lam = torch.tensor(0.5, requires_grad=True)
            diff_attention(q, k, v, lam, is_causal=True, backend="blockwise").sum().backward()
            assert all(x.grad.isfinite().all() for x in (q, k, v, lam))

        torch.set_num_threads(1)
        run(512)  # whatever libraries allocate once
        before = peak()
        run(4096)
        print(peak() - before)
    """
    done = fresh.run(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48, f"peak memory grew by {done.stdout.strip()} MiB"
