"""Every request that does not fit is refused in one sentence that says what came and what is allowed."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, zeros
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_upper_left

from budget import BACKENDS, takes
from diff_transformer import diff_attention, diff_attention_maps
from diff_transformer.ops import lambda_value, rms_norm
from diff_transformer.ops.cpu.cpu_backend import available_to_auto

B, H, HK, N, S, D, DV = 2, 4, 2, 4, 7, 6, 3


def fitting() -> dict[str, Any]:
    return {
        "q": torch.randn(B, H, 2, N, D),
        "k": torch.randn(B, HK, 2, S, D),
        "v": torch.randn(B, HK, S, DV),
        "lam": torch.tensor(0.5),
    }


def packed(ends: Any, batch: int = 1, queries: int = S) -> dict[str, Any]:
    """The tensors of one sequence of S tokens (or of what is said), cut into documents at ``ends``."""
    q, k, v = torch.randn(batch, H, 2, queries, D), torch.randn(batch, HK, 2, S, D), torch.randn(batch, HK, S, DV)
    return {"q": q, "k": k, "v": v, "cu_seqlens": torch.as_tensor(ends)}


def says(*fragments: str, **changes: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return changes, fragments


# What is changed → what the sentence has to say: the name, what came, and what may come.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q without a map axis": says("q", "(2, 4, 4, 6)", "(B, H, 2, N, d)", q=zeros(B, H, N, D)),
    "a pair of three": says("q", "pair", "Tensor, Tensor, Tensor", q=(zeros(B, H, N, D),) * 3),
    "a pair with a number": says("q", "pair", "Tensor, float", q=(zeros(B, H, N, D), 1.0)),
    "a pair with a map axis": says(
        "pair", "(B, r·G, N, d)", "(2, 4, 2, 4, 6)", "(2, 2, 4, 6)", q=(zeros(B, H, 2, N, D), zeros(B, HK, N, D))
    ),
    "a pair of two lengths": says(
        "pair", "(B, G, N, d)", "(2, 4, 4, 6)", "(2, 2, 1, 6)", q=(zeros(B, H, N, D), zeros(B, HK, 1, D))
    ),
    "a pair of two dtypes": says(
        "pair", "torch.float32", "torch.float64", q=(zeros(B, H, N, D), zeros(B, HK, N, D).double())
    ),
    "more noise heads than signal heads": says(
        "signal", "noise", "multiple", "4", "8", q=(zeros(B, H, N, D), zeros(B, 8, N, D))
    ),
    "groups that do not divide": says("groups", "multiple", "3", "2", q=(zeros(B, 6, N, D), zeros(B, 3, N, D))),
    "q with one map": says("q", "(2, 4, 1, 4, 6)", "(B, H, 2, N, d)", q=zeros(B, H, 1, N, D)),
    "k without a map axis": says("k", "(2, 2, 7, 6)", "(B, H_kv, 2, S, d)", k=zeros(B, HK, S, D)),
    "k with three maps": says("k", "(2, 2, 3, 7, 6)", "(B, H_kv, 1, S, d)", k=zeros(B, HK, 3, S, D)),
    "v with a map axis": says("v", "(2, 2, 2, 7, 3)", "(B, H_kv, S, dv)", v=zeros(B, HK, 2, S, DV)),
    "heads that do not divide": says("heads", "multiple", "4", "3", k=zeros(B, 3, 2, S, D), v=zeros(B, 3, S, DV)),
    "widths of q and k": says("q and k", "width", "(2, 4, 2, 4, 6)", "(2, 2, 2, 7, 5)", k=zeros(B, HK, 2, S, 5)),
    "batches of q and k": says("q and k", "batch", "(2, 4, 2, 4, 6)", "(1, 2, 2, 7, 6)", k=zeros(1, HK, 2, S, D)),
    "lengths of k and v": says("v", "k", "length", "(2, 2, 2, 7, 6)", "(2, 2, 8, 3)", v=zeros(B, HK, 8, DV)),
    "heads of k and v": says("v", "k", "heads", "(2, 2, 2, 7, 6)", "(2, 4, 7, 3)", v=zeros(B, H, S, DV)),
    "no query": says("q", "(2, 4, 2, 0, 6)", "at least one", q=zeros(B, H, 2, 0, D)),
    "no key": says("k", "(2, 2, 2, 0, 6)", "at least one", k=zeros(B, HK, 2, 0, D), v=zeros(B, HK, 0, DV)),
    "no value channel": says("v", "(2, 2, 7, 0)", v=zeros(B, HK, S, 0)),
    "whole numbers": says("floating", "torch.int64", q=zeros(B, H, 2, N, D).long(), k=zeros(B, HK, 2, S, D).long()),
    "devices of q and k": says("q and k", "device", "cpu", "meta", k=zeros(B, HK, 2, S, D, device="meta")),
    "dtypes of q and k": says("q and k", "torch.float32", "torch.bfloat16", k=zeros(B, HK, 2, S, D).bfloat16()),
    "dtypes of k and v": says("v", "torch.float32", "torch.float64", v=zeros(B, HK, S, DV).double()),
    "q is no tensor": says("q", "tensor", "list", q=[1.0]),
    "v is no tensor": says("v", "tensor", "NoneType", v=None),
    "λ of two heads": says("lam", "(2, 1)", "(B, H, N)", "(2, 4, 4)", lam=zeros(2, 1)),
    "λ of the keys' length": says("lam", "(7)", "(B, H, N)", "(2, 4, 4)", lam=zeros(S)),
    "λ in whole numbers": says("lam", "floating", "torch.int64", lam=torch.tensor(1)),
    "λ not a number": says("lam", "finite", "nan", lam=math.nan),
    "λ without a value": says("lam must be on the device of q, cpu", "meta", lam=torch.tensor(0.5, device="meta")),
    "λ a string": says("lam", "number", "str", lam="0.8"),
    "mask transposed": says("attn_mask", "(7, 4)", "(B, H, N, S)", "(2, 4, 4, 7)", attn_mask=zeros(S, N)),
    "mask of a batch (B, S)": says("attn_mask", "(2, 7)", "(2, 4, 4, 7)", attn_mask=zeros(B, S)),
    "mask in whole numbers": says("attn_mask", "boolean", "floating", "torch.int64", attn_mask=zeros(N, S).long()),
    "mask on another device": says(
        "attn_mask must be on the device of q, cpu", "meta", attn_mask=zeros(N, S, device="meta")
    ),
    "mask no tensor": says("attn_mask", "tensor", "list", attn_mask=[[True]]),
    "is_causal a word": says("is_causal", "'no'", "True or False", is_causal="no"),
    "is_causal a number": says("is_causal", "1", "True or False", is_causal=1),
    "window 0": says("window", "0", "1 or more", window=0),
    "window a fraction": says("window", "2.5", "whole number", window=2.5),
    "window true": says("window", "True", "whole number", window=True),
    "window beyond 64 bits": says("window", str(-(1 << 63) - 1), "1 or more", window=-(1 << 63) - 1),
    "dropout false": says("dropout_p", "False", "number", dropout_p=False),
    "scale not a number": says("scale", "nan", "finite", scale=math.nan),
    "scale true": says("scale", "True", "finite number", scale=True),
    "scale a tensor": says("scale", "tensor", "finite number", scale=torch.tensor(0.5)),
    "documents no tensor": says("cu_seqlens", "tensor", "list", **packed([0, S]) | {"cu_seqlens": [0, S]}),
    "documents in floating numbers": says("cu_seqlens", "int32 or int64", "(2) torch.float32", **packed([0.0, S])),
    "documents with a batch axis": says("cu_seqlens", "(documents + 1,)", "(1, 2) torch.int64", **packed([[0, S]])),
    "no document": says("cu_seqlens", "(documents + 1,)", "(1) torch.int64", **packed([0])),
    "documents in a batch": says("cu_seqlens", "B = 1", "B 2, N 7, S 7", **packed([0, S], batch=B)),
    "documents of fewer queries than keys": says("cu_seqlens", "N = S", "B 1, N 4, S 7", **packed([0, N], queries=N)),
    "documents that do not begin at 0": says("cu_seqlens", "from 0 to N = 7", "[1, 7]", **packed([1, S])),
    "documents that end too early": says("cu_seqlens", "from 0 to N = 7", "[0, 3, 6]", **packed([0, 3, 6])),
    "documents that decrease": says("cu_seqlens", "decreasing", "[0, 4, 3, 7]", **packed([0, 4, 3, S])),
    "many documents that decrease": says(
        "cu_seqlens", "decreasing", "[0, 1, 2, 3, …, 7]", **packed([0, 1, 2, 3, 4, 3, 5, 6, 6, S])
    ),
    "documents in a sparse tensor": says(
        "cu_seqlens must be a dense tensor", "torch.sparse_coo", **packed(torch.tensor([0, S]).to_sparse())
    ),
    "norm weight no tensor": says("norm_weight", "tensor", "float", norm_weight=1.0),
    "norm weight of another width": says("norm_weight", "(3,)", "(6) torch.float32", norm_weight=zeros(D)),
    "norm weight in whole numbers": says("norm_weight", "floating", "(3) torch.int64", norm_weight=zeros(DV).long()),
    "norm eps negative": says("norm_eps", "0 or more", "-1e-05", norm_weight=zeros(DV), norm_eps=-1e-5),
    "norm eps not a number": says("norm_eps", "finite", "nan", norm_weight=zeros(DV), norm_eps=math.nan),
    "norm eps a string": says("norm_eps", "finite number", "'1e-5'", norm_eps="1e-5"),
    "norm scale infinite": says("norm_scale", "finite", "inf", norm_scale=math.inf),
    "norm scale a tensor": says("norm_scale", "finite number", "tensor", norm_scale=torch.tensor(1.0)),
    "unknown backend": says("backend", "'flash'", "'auto'", "'reference'", "'blockwise'", "'sdpa'", backend="flash"),
    "blockwise with a learned mask": says(
        "'blockwise'", "attn_mask", "gradient", attn_mask=zeros(N, S, requires_grad=True), backend="blockwise"
    ),
}
NOT_FOR_MAPS = ("v ", "k and v", "value", "backend", "blockwise", "norm ", "dropout")


def one_sentence(message: str) -> bool:
    return message.endswith(".") and "\n" not in message and message.count(". ") == 0 and len(message) < 200


FUNCTIONS = [(diff_attention, case) for case in REFUSED]
FUNCTIONS += [(diff_attention_maps, case) for case in REFUSED if not any(word in case for word in NOT_FOR_MAPS)]


@pytest.mark.parametrize(("function", "case"), FUNCTIONS, ids=lambda value: getattr(value, "__name__", value))
def test_refused(function: Callable[..., Any], case: str) -> None:
    """Without gradients, too, where the kernel for the CPU answers so few queries in one step."""
    changes, fragments = REFUSED[case]
    available_to_auto()  # loads the kernel, before which nothing is answered in one step
    arguments = {**fitting(), **changes}
    if function is diff_attention_maps:
        del arguments["v"]
    for differentiable in (True,) if "learned" in case else (True, False):
        with torch.set_grad_enabled(differentiable), pytest.raises((ValueError, TypeError)) as refusal:
            function(**arguments)
        message = str(refusal.value)
        assert one_sentence(message), message
        for fragment in fragments:
            assert fragment in message, f"{fragment!r} is not said: {message}"


def test_what_fits_is_not_refused() -> None:
    assert diff_attention(**fitting()).shape == (B, H, N, DV)
    for name in (*BACKENDS, "auto"):
        if takes(name, torch.float32):
            assert diff_attention(**fitting(), backend=name).shape == (B, H, N, DV)
    lam = torch.rand(H, 1)
    maps = diff_attention_maps(fitting()["q"], fitting()["k"], lam, window=1, scale=0.25, attn_mask=zeros(1, 1, 1, S))
    assert [m.shape for m in maps] == [(B, H, N, S)] * 3
    for ends in ([0, S], [0, 0, 3, 3, S], [*range(S + 1)]):
        assert diff_attention(**{**fitting(), **packed(torch.tensor(ends))}).shape == (1, H, S, DV)
    assert diff_attention(**fitting(), norm_weight=zeros(DV), norm_eps=0, norm_scale=-1).shape == (B, H, N, DV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "auto"])
def test_a_learned_mask_gets_its_gradient_where_it_is_accepted(backend: str, dtype: torch.dtype) -> None:
    inputs = fitting()
    mask = torch.randn(1, H, N, S, dtype=dtype, requires_grad=True)
    out = diff_attention(**inputs, attn_mask=mask, backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), [mask])
    first, second, _ = diff_attention_maps(inputs["q"], inputs["k"], 0.5, attn_mask=mask)
    values = inputs["v"].repeat_interleave(H // HK, dim=1)
    (expected,) = torch.autograd.grad(((first - 0.5 * second) @ values).square().sum(), [mask])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_arguments_after_lambda_are_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        diff_attention(*fitting().values(), True)  # type: ignore[misc]


# Tensors of the right shape whose values are not in a storage of their own, and what a sentence calls them.
NOT_DENSE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda x: x.to_sparse(), "torch.sparse_coo"),
    "zeros": (lambda x: torch._efficientzerotensor(x.shape), "tensor of zeros without memory"),
    "of oneDNN": (lambda x: x.to_mkldnn(), "torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "nested tensor"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "nested tensor"),
    "masked": (lambda x: masked_tensor(x, torch.ones_like(x, dtype=torch.bool)), "MaskedTensor"),
    "causal bias": (lambda x: causal_upper_left(N, S), "CausalBias"),
    "distributed": (lambda x: DTensor.from_local(x, init_device_mesh("cpu", (1,)), run_check=False), "DTensor"),
}
DENSE = {
    "q": zeros(B, H, 2, N, D),
    "k": zeros(B, HK, 2, S, D),
    "v": zeros(B, HK, S, DV),
    "lam": zeros(B, H, N),
    "attn_mask": zeros(N, S),
    "norm_weight": zeros(DV),
}


WAYS = [(argument, False) for argument in DENSE] + [(name, True) for name in DENSE if name not in ("v", "norm_weight")]


def call(maps: bool, **arguments: Any) -> Any:
    """The operator, or its maps, where the kernel for the CPU may answer in one step."""
    with torch.no_grad():
        if maps:
            return diff_attention_maps(**{name: value for name, value in arguments.items() if name != "v"})
        return diff_attention(**arguments)


@pytest.fixture(scope="module")
def _process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of (MaskedTensors|nested tensors) is in prototype stage:UserWarning"
)
@pytest.mark.parametrize(("argument", "maps"), WAYS)
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_what_does_not_hold_its_own_numbers_is_refused(kind: str, argument: str, maps: bool) -> None:
    """A sparse λ, read as if it were dense, gave other numbers, and never the same twice."""
    make, name = NOT_DENSE[kind]
    if name == "nested tensor" and DENSE[argument].dim() == 1:
        pytest.skip("what is nested has rows")
    unfit = {argument: make(DENSE[argument])}
    call(maps, **fitting())  # from here on the CPU kernel is loaded, which would answer in one step
    with pytest.raises(TypeError, match=rf"^{argument} must be a dense tensor") as refusal:
        call(maps, **{**fitting(), **unfit})
    assert one_sentence(str(refusal.value))
    assert name in str(refusal.value)


@pytest.mark.parametrize(("argument", "maps"), WAYS)
def test_float8_is_refused(argument: str, maps: bool) -> None:
    names = ("q", "k", "v") if argument in ("q", "k", "v") else (argument,)
    float8 = {name: DENSE[name].to(torch.float8_e4m3fn) for name in names}
    with pytest.raises(ValueError, match="16 bits or more") as refusal:
        call(maps, **{**fitting(), "lam": DENSE["lam"], **float8})
    assert one_sentence(str(refusal.value))
    assert str(refusal.value).startswith(names[0])
    assert "torch.float8_e4m3fn" in str(refusal.value)


def test_the_norm_and_the_formula_of_lambda_refuse_float8() -> None:
    wide, float8 = torch.ones(4), torch.ones(4).to(torch.float8_e4m3fn)
    for name, arguments in (("x", (float8, wide)), ("weight", (wide, float8))):
        with pytest.raises(
            ValueError, match=rf"^{name} must be floating, of 16 bits or more, got torch\.float8_e4m3fn"
        ):
            rms_norm(*arguments)
    for weight in (torch.ones(1), torch.ones(1).double(), torch.ones(3, 4).double()):  # two would broadcast
        with pytest.raises(ValueError, match=r"^weight must be \(4,\), the last axis of x, got \("):
            rms_norm(torch.ones(3, 4), weight)
    with pytest.raises(ValueError, match=r"^the vectors of λ must be floating, of 16 bits or more, got torch\.float8"):
        lambda_value(wide, wide, wide, float8, 0.8)


class Plain(Tensor):
    """What a user makes to carry something along."""


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_tensors_that_hold_what_they_mean_are_taken(backend: str) -> None:
    """Parameters, a subclass, and the imaginary part of a conjugate, which is the negative of what is stored."""
    if not takes(backend, torch.float32):
        pytest.skip(f"{backend} is not there")
    dense: dict[str, Any] = {name: torch.randn(x.shape) for name, x in DENSE.items()}

    def answer(make: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return diff_attention(**{name: make(x) for name, x in dense.items()}, backend=backend)

    due = answer(lambda x: x)
    makers: list[Callable[[Tensor], Tensor]] = [
        torch.nn.Parameter,
        lambda x: x.as_subclass(Plain),
        lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    ]
    for make in makers:
        torch.testing.assert_close(answer(make).as_subclass(Tensor), due)
