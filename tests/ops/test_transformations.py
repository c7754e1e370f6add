"""torch.func: auto takes a backend whose gradient it can take, a backend named that has none refuses in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from budget import takes
from diff_transformer.nn import DiffAttention
from diff_transformer.ops import diff_attention

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # torch takes vmap's sequences one by one through the operators that it does not know, and says so.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous:UserWarning"),  # of vmap's making
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own
]
OPAQUE = ("blockwise", "cpu", "triton", "flex", "fa2", "fa3", "fa4")


def inputs(batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v and λ, two query heads to a key head."""
    shapes = (1, 4, 2, 5, 4), (1, 2, 2, 5, 4), (1, 2, 5, 8), ()
    return tuple(torch.randn((*batch, *shape), dtype=dtype) for shape in shapes)


def loss(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, backend: str = "auto", **options: Any) -> Tensor:
    return diff_attention(q, k, v, lam, is_causal=True, backend=backend, **options).square().sum()


def by_autograd(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*leaves, **options), leaves)


ALL = (0, 1, 2, 3)


# float32 has the kernel for its default on the CPU, float64 `blockwise`.
@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_autograd(backend: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype=dtype)
    result, expected = grad(loss, ALL)(*tensors, backend), by_autograd(*tensors)
    torch.testing.assert_close(result, expected)
    result = jacrev(lambda *leaves: diff_attention(*leaves, backend=backend), ALL)(*tensors)
    assert [x.shape for x in result] == [(1, 4, 5, 8, *x.shape) for x in tensors]
    jacobian = torch.autograd.functional.jacobian(lambda *leaves: diff_attention(*leaves, backend="reference"), tensors)
    torch.testing.assert_close(result, jacobian)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_gradients_through_what_is_mapped(backend: str) -> None:
    tensors = inputs((3,), torch.float32)
    expected = [torch.stack(each) for each in zip(*map(by_autograd, *tensors), strict=True)]

    def of(*leaves: Tensor) -> Tensor:
        return vmap(lambda *each: loss(*each, backend))(*leaves).sum()

    torch.testing.assert_close(list(grad(of, ALL)(*tensors)), expected)
    leaves = [x.clone().requires_grad_() for x in tensors]
    torch.testing.assert_close(
        list(torch.autograd.grad(of(*leaves), leaves)), expected
    )  # ordinary autograd around vmap
    rows = jacrev(vmap(lambda *each: loss(*each, backend)), ALL)(*tensors)
    torch.testing.assert_close([each.diagonal(dim1=0, dim2=1).movedim(-1, 0) for each in rows], expected)


def test_second_derivatives_and_forward_mode() -> None:
    q, k, v, lam = inputs()
    for i, leaf in ((0, q), (3, lam)):

        def of(x: Tensor, backend: str = "auto", i: int = i) -> Tensor:
            return loss(*(x if j == i else argument for j, argument in enumerate((q, k, v, lam))), backend=backend)

        plain = torch.autograd.functional.hessian(lambda x, of=of: of(x, "reference"), leaf)
        torch.testing.assert_close(hessian(of)(leaf), plain)
        torch.testing.assert_close(jacfwd(of)(leaf), jacrev(of)(leaf))


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_mapped_without_a_gradient(backend: str) -> None:
    """Documents that differ from one to the next, too: nobody can look at their ends then."""
    tensors, ends = inputs((3,), torch.float32), torch.tensor([[0, 2, 5], [0, 0, 5], [0, 1, 5]])

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, ends: Tensor | None) -> Tensor:
        return diff_attention(q, k, v, lam, cu_seqlens=ends, backend=backend)

    for documents, axis in ((ends, 0), (ends[0], None), (None, None)):
        each = documents if axis == 0 else [documents] * 3
        expected = [attend(*(x[i] for x in tensors), each[i]) for i in range(3)]
        result = vmap(attend, (0, 0, 0, 0, axis))(*tensors, documents)
        torch.testing.assert_close(result, torch.stack(expected))
    with pytest.raises(ValueError, match=r"cu_seqlens must go from 0"):
        vmap(lambda q: diff_attention(q, *(x[0] for x in tensors[1:]), cu_seqlens=torch.tensor([0, 4])))(tensors[0])


@pytest.mark.parametrize("backend", OPAQUE)
@pytest.mark.parametrize("transform", [grad, jacrev, vmap, lambda f: vmap(grad(f)), lambda f: jacrev(vmap(f))])
def test_a_named_one_refuses(backend: str, transform: Callable[..., Any]) -> None:
    if backend not in ("flex", "fa2", "fa3", "fa4") and not takes(backend, torch.float32):
        pytest.skip(f"{backend} does not run here")
    q, *others = inputs((3,), torch.float32)
    q = q if transform not in (grad, jacrev) else q[0]
    others = [x[0] for x in others]
    with pytest.raises(ValueError, match=rf"'{backend}' cannot run.*torch\.func.*'reference', or in torch.func 'sdpa'"):
        transform(lambda x: loss(x, *others, backend=backend))(q)


@pytest.mark.parametrize("backend", ["cpu", "triton", "blockwise", "sdpa"])
def test_gradients_of_several_losses_and_of_none(backend: str) -> None:
    """As torch.autograd has them: batches of its older vmap, and zeros that are only a shape."""
    if not takes(backend, torch.float32):
        pytest.skip(f"{backend} does not run here")
    leaves, results = [x.requires_grad_() for x in inputs(dtype=torch.float32)], []
    for name in (backend, "reference"):
        out = diff_attention(*leaves, is_causal=True, backend=name)
        grads = torch.stack((torch.ones_like(out), out.detach()))
        several = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
        results.append((*several, *torch.autograd.grad(out, leaves, torch._efficientzerotensor(out.shape))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["cpu", "triton", "blockwise"])
def test_hooks_that_give_what_was_saved_another_layout(backend: str) -> None:
    """Not sdpa: torch's own gradients are wrong then."""
    if not takes(backend, torch.float32):
        pytest.skip(f"{backend} does not run here")
    tensors = inputs(dtype=torch.float32)
    options: dict[str, Any] = {"norm_weight": torch.rand(8), "signal_weight": torch.rand(4, 1)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x):
        result = by_autograd(*tensors, backend=backend, **options)
    torch.testing.assert_close(result, by_autograd(*tensors, backend="reference", **options))


def test_the_norms_weight_alone() -> None:
    """The gradient that a kernel with the norm inside does not see coming."""
    tensors = inputs(dtype=torch.float32)
    result = grad(lambda weight: loss(*tensors, norm_weight=weight))(torch.ones(8))
    weight = torch.ones(8, requires_grad=True)
    loss(*tensors, "reference", norm_weight=weight).backward()
    torch.testing.assert_close(result, weight.grad)


def test_compiled() -> None:
    tensors = inputs(dtype=torch.float32)
    compiled = torch.compile(grad(loss, ALL), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), by_autograd(*tensors))


def test_a_layers_parameters() -> None:
    """λ's vectors among them, of a layer in the style that torch.func wants."""
    layer = DiffAttention(16, 4, 2, num_key_value_heads=2).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def of(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,), {"is_causal": True}).square().sum()

    def plainly(x: Tensor) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(layer(x, is_causal=True).square().sum(), list(layer.parameters()))
        return dict(zip(parameters, gradients, strict=True))

    result, expected = grad(of)(parameters, x), plainly(x)
    assert result["lam.q1"].any()
    torch.testing.assert_close(result, expected)
    each = vmap(grad(of), (None, 0))(parameters, x.unsqueeze(1))
    torch.testing.assert_close({name: value.sum(0) for name, value in each.items()}, expected)
