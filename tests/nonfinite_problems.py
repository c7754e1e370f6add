"""Problems with NaN and infinity in keys and values, beside the same with zeros there: the answers' bits are equal."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from budget import Problem, solve_by_oracle


@dataclass(frozen=True)
class Spoilt:
    """A problem with zeros in some rows of keys and values, and the same with NaN and infinity in these places.

    That is in all keys that no query sees, and in one that some queries see, ``seeing`` (B, H, N). Nothing is asked of
    the outputs of these: their gradient ``dout`` is 0.
    """

    zeros: Problem
    spoilt: Problem
    seeing: Tensor


def spoil(problem: Problem, tensor: str) -> Spoilt:
    """``which`` of "keys" and "values" is spoilt; of a row that nobody sees all, of the other one number."""
    visible = solve_by_oracle(problem)[1].visible
    batch, key_heads, s = problem.v.shape[:3]
    of_key_head = visible.reshape(batch, key_heads, -1, visible.shape[2], s)
    unseen = torch.from_numpy(~of_key_head.any((2, 3)))
    partly = np.argwhere(of_key_head.any((2, 3)) & ~of_key_head.all((2, 3)))
    seeing = np.zeros(visible.shape[:3], bool)
    zeros, spoilt = ([x.clone() for x in (problem.k, problem.v)] for _ in range(2))
    index = 0 if tensor == "keys" else 1
    for x, fill in ((zeros, 0.0), (spoilt, float("nan"))):
        rows = unseen.unsqueeze(2) if tensor == "keys" else unseen
        x[index].masked_fill_(rows.unsqueeze(-1), fill)
    spoilt[index][..., 0].masked_fill_(unseen.unsqueeze(2) if tensor == "keys" else unseen, float("inf"))
    if len(partly):
        b, h, j = partly[len(partly) // 2]
        groups = visible.shape[1] // key_heads
        seeing[b, h * groups : (h + 1) * groups] = visible[b, h * groups : (h + 1) * groups, :, j]
        zeros[0][b, h, :, j], zeros[1][b, h, j] = 0, 0
        spoilt[0][b, h, :, j], spoilt[1][b, h, j] = 0, 0
        spoilt[index][b, h, ..., j, -1] = float("nan")
    assert spoilt[index].isnan().any() or not (unseen.any() or len(partly))
    marked = torch.from_numpy(seeing)
    dout = problem.dout.masked_fill(marked.unsqueeze(-1), 0.0)
    return Spoilt(
        zeros=replace(problem, k=zeros[0], v=zeros[1], dout=dout),
        spoilt=replace(problem, k=spoilt[0], v=spoilt[1], dout=dout),
        seeing=marked,
    )


def check_output(out: Tensor, expected: Tensor, seeing: Tensor) -> None:
    assert out[seeing].isnan().any(-1).all()
    assert torch.equal(out[~seeing], expected[~seeing])


def check_pair(pair: Spoilt, attention: Callable[..., Tensor], backend: str) -> None:
    """Bit for bit, the output but for the queries that see a NaN, and all gradients."""
    expected, answer = (x.solve(attention, backend=backend) for x in (pair.zeros, pair.spoilt))
    check_output(answer.pop("out"), expected.pop("out"), pair.seeing)
    torch.testing.assert_close(answer, expected, rtol=0, atol=0)
