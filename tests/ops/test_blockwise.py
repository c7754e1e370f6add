"""What the blockwise backend promises beyond the right numbers: memory linear in N."""

import textwrap
from pathlib import Path

import pytest

import fresh


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
