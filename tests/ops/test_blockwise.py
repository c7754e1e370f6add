"""What the blockwise backend promises beyond the right numbers: memory linear in N, and hidden blocks left alone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.ops import blockwise


@pytest.mark.parametrize("heads", [1, 4, 64, 1024])
@pytest.mark.parametrize("s", [1, 63, 4096, 10**6])
def test_rows_per_block(heads: int, s: int) -> None:
    for n in (1, 63, 4096, 10**6):
        rows = blockwise.rows_per_block(heads, n, s)
        assert 1 <= rows <= n
        assert heads * rows * s <= max(blockwise.BLOCK_SCORES, heads * s * blockwise.MIN_ROWS)


@pytest.mark.parametrize(
    ("n", "s", "window"), [(12, 12, None), (12, 12, 4), (12, 20, None), (12, 20, 4), (20, 12, None), (20, 12, 4)]
)
def test_hidden_blocks_are_not_touched(monkeypatch: pytest.MonkeyPatch, n: int, s: int, window: int | None) -> None:
    """NaN in a key that no query of a block sees would show in the block's output if the block were computed."""
    monkeypatch.setattr(blockwise, "MIN_ROWS", 4)
    monkeypatch.setattr(blockwise, "MAX_ROWS", 4)
    q, k, v = torch.randn(1, 2, 2, n, 4), torch.randn(1, 1, 2, s, 4), torch.randn(1, 1, s, 8)
    options = {"is_causal": True, "window": window, "backend": "blockwise"}
    whole = diff_attention(q, k, v, 0.5, **options)
    for start in range(0, n, 4):
        first, last = start + s - n, start + 3 + s - n  # where the block's queries stand among the keys
        hidden = torch.ones(s, dtype=torch.bool)
        hidden[max(0, first + 1 - (window or s + n)) : max(0, last + 1)] = False
        leaves = [
            q.clone().requires_grad_(),
            k.masked_fill(hidden[:, None], float("nan")).requires_grad_(),
            v.masked_fill(hidden[:, None], float("nan")).requires_grad_(),
        ]
        out = diff_attention(*leaves, 0.5, **options)
        assert torch.equal(out[:, :, start : start + 4], whole[:, :, start : start + 4])


def test_memory_is_linear(tmp_path: Path) -> None:
    """6,144 tokens, forward and backward: one map alone, 6,144² numbers, would be 144 MiB."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    program = """
        import torch
        from diff_transformer import diff_attention

        def peak():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024

        def run(n):
            q, k = torch.randn(2, 1, 1, 2, n, 16).unbind()
            q, k, v = (x.requires_grad_() for x in (q, k, torch.randn(1, 1, n, 32)))
            lam = torch.tensor(0.5, requires_grad=True)
            diff_attention(q, k, v, lam, is_causal=True, backend="blockwise").sum().backward()
            assert all(x.grad.isfinite().all() for x in (q, k, v, lam))

        torch.set_num_threads(1)
        run(512)  # whatever libraries allocate once
        before = peak()
        run(6144)
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert int(done.stdout) < 72, f"peak memory grew by {done.stdout.strip()} MiB"
