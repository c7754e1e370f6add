"""What the blockwise backend promises beyond the right numbers: memory linear in N, and hidden blocks left alone."""

import textwrap
from pathlib import Path

import pytest
import torch

import fresh
from diff_transformer import diff_attention
from diff_transformer.ops import blockwise
from diff_transformer.ops.attention_request import Request


@pytest.mark.parametrize("heads", [1, 4, 64, 1024])
@pytest.mark.parametrize("s", [1, 63, 4096, 10**6])
def test_rows_per_block(heads: int, s: int) -> None:
    for n in (1, 63, 4096, 10**6):
        for scores in (blockwise.CORE_SCORES, blockwise.DEVICE_SCORES):
            rows = blockwise.rows_per_block(heads, n, s, scores)
            assert min(n, blockwise.MIN_ROWS) <= rows <= min(n, blockwise.MAX_ROWS)
            assert heads * rows * s <= max(scores, heads * s * blockwise.MIN_ROWS)


@pytest.mark.parametrize(
    ("heads", "s", "rows"), [(1, 128, 64), (1, 512, 64), (1, 1024, 128), (1, 4096, 128), (1, 8192, 64), (4, 1024, 64)]
)
def test_a_short_sequence_and_a_long_one_take_fewer_rows(heads: int, s: int, rows: int) -> None:
    assert blockwise.rows_per_block(heads, s, s) == rows


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 12, 100])
def test_parts_hold_every_head_once_and_no_more_than_asked_for(size: int) -> None:
    batch, heads = 5, 4
    visits = torch.zeros(batch, heads)
    for slices in blockwise.parts(batch, heads, size):
        visits[slices] += 1
        assert 1 <= visits[slices].numel() <= size
    assert (visits == 1).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_of_a_block_stay_within_the_bound(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """However many heads and sequences there are, a buffer holds the scores of as many as fit, or of one head."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for batch, heads, key_heads, n in ((32, 4, 4, 128), (64, 8, 2, 256), (1, 8, 4, 2048), (2, 2, 2, 16384)):
        q, k = torch.empty(batch, heads, 2, n, 1), torch.empty(batch, key_heads, 2, n, 1)
        v, lam = torch.empty(batch, key_heads, n, 1), torch.empty(batch, heads, n)
        problem = blockwise._Problem(3, Request(q, k, v, lam, None, True, 1.0, None, None))
        bound = threads * blockwise.CORE_SCORES
        group = heads // key_heads * n
        assert len(problem.buffers) == 3
        assert problem.buffers[0].numel() <= max(bound, group * blockwise.MIN_ROWS)
        most = min(bound, batch * key_heads * group * blockwise.MIN_ROWS)
        assert problem.buffers[0].numel() > most // 4  # and not far fewer


@pytest.mark.parametrize(
    ("n", "s", "window"), [(12, 12, None), (12, 12, 4), (12, 20, None), (12, 20, 4), (20, 12, None), (20, 12, 4)]
)
def test_hidden_blocks_are_not_touched(monkeypatch: pytest.MonkeyPatch, n: int, s: int, window: int | None) -> None:
    """NaN in a key that no query of a block sees would show in the block's output if the block were computed."""
    monkeypatch.setattr(blockwise, "MIN_ROWS", 4)
    monkeypatch.setattr(blockwise, "MAX_ROWS", 4)
    q, k, v = torch.randn(1, 2, 2, n, 4), torch.randn(1, 1, 2, s, 4), torch.randn(1, 1, s, 8)
    options = {"is_causal": True, "window": window, "backend": "blockwise"}
    expected = diff_attention(q, k, v, 0.5, **options)
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
        assert torch.equal(out[:, :, start : start + 4], expected[:, :, start : start + 4])


def mask_of(kind: str, n: int) -> torch.Tensor:
    keys, queries = torch.arange(n), torch.arange(n).unsqueeze(1)
    if kind == "padding":  # sequence b starts at 3·b and ends 2 before the others' end
        return torch.stack([(keys >= 3 * b) & (keys < n - 2) for b in range(3)])[:, None, None]
    return (keys <= queries).expand(1, 1, n, n)


@pytest.mark.parametrize("kind", ["padding", "causal"])
def test_keys_hidden_by_a_boolean_mask_are_not_touched(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The products of each block are as wide as the keys that any of its queries sees."""
    monkeypatch.setattr(blockwise, "MIN_ROWS", 4)
    monkeypatch.setattr(blockwise, "MAX_ROWS", 4)
    monkeypatch.setattr(blockwise, "CORE_SCORES", 1)  # one head at a time
    n = 12
    q, k, v = (
        x.requires_grad_() for x in (torch.randn(3, 2, 2, n, 4), torch.randn(3, 2, 2, n, 4), torch.randn(3, 2, n, 8))
    )
    mask = mask_of(kind, n)
    seen = mask.expand(3, 2, n, n)
    widths = []
    for block in seen.flatten(0, 1).unflatten(1, (-1, 4)).any(2).flatten(0, 1):
        columns = block.nonzero().flatten()
        widths.append(int(columns[-1] - columns[0]) + 1)
    computed = []
    maps = blockwise._Problem.maps

    def watch(self, part, block, mask):
        first, second = maps(self, part, block, mask)
        computed.append(first.shape[-1])
        return first, second

    monkeypatch.setattr(blockwise._Problem, "maps", watch)
    out = diff_attention(q, k, v, 0.5, attn_mask=mask, backend="blockwise")
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert computed == widths * 2  # forward and backward
    expected = diff_attention(q, k, v, 0.5, attn_mask=mask, backend="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), [q, k, v]))


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
