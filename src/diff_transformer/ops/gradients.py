"""What an operator with a backward of its own tells torch about that backward, the same for every backend."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def fake_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and lam as torch.compile sees them: contiguous, of the inputs' shapes and dtypes."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), lam.new_empty(lam.shape)


def refuse_second_order(backend: str) -> Callable[..., None]:
    """The derivative of a backward that has none: it says so instead of passing for a constant."""

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"backend {backend!r} cannot be differentiated twice; use backend='reference' for second-order gradients."
        )

    return refuse
