"""FlexAttention as a backend: compiled, skipping hidden blocks, taking BlockMasks, and saying what it cannot do."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from budget import Case, Problem, build, prepared
from diff_transformer import diff_attention, diff_attention_maps
from diff_transformer.ops import flex
from full_run import short_run

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),  # so is this
    pytest.mark.skipif(
        not flex._cpu_has_vectors() or not any(map(shutil.which, ("g++", "clang++", "c++"))),
        reason="torch compiles FlexAttention for the CPU with a C++ compiler and AVX2",
    ),
]

# Few shapes: torch compiles for some seconds for each, and for each kind of mask. Two blocks of queries and of keys.
BLOCK = 128  # rows, and keys, of torch's blocks
TWO_BLOCKS = Case(heads=4, queries=150, keys=150, d=16, dv=32, lam="full")
PACKED = replace(TWO_BLOCKS, batch=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "window 9": {"is_causal": True, "window": 9},
    "window 130": {"is_causal": True, "window": 130},
    "window 9, not causal": {"window": 9},
    "window beyond 64 bits": {"is_causal": True, "window": 10**30},
    "3 signal heads to a noise map, λ for each token": {
        "is_causal": True,
        "lam": "tokens alone",
        "ratio": 3,
        "heads": 6,
    },
    "λ as a number": {"is_causal": True, "lam": "float"},
    "shared keys, projection layout": {"key_maps": 1, "is_causal": True, "layout": "projection"},
    "one query, scale 0": {"queries": 1, "is_causal": True, "scale": 0.0},
    "20 queries, cache layout": {"queries": 20, "is_causal": True, "window": 7, "layout": "cache"},
    "20 keys, negative scale": {"keys": 20, "is_causal": True, "scale": -0.5},
    "odd widths": {"d": 5, "dv": 7, "is_causal": True},
    "20 queries, expanded layout, shared keys, mask by head, scale": {
        "queries": 20,
        "key_maps": 1,
        "is_causal": True,
        "window": 7,
        "mask": "bool (B, H, N, S)",
        "layout": "expanded",
        "scale": 0.3,
    },
    "bool (B, 1, 1, S), causal": {"mask": "bool (B, 1, 1, S)", "is_causal": True},
    "bool (B, 1, 1, S), window": {"mask": "bool (B, 1, 1, S)", "window": 9},
    "bool (B, H, N, S)": {"mask": "bool (B, H, N, S)"},
    "bool (H, 1, S), expanded layout": {"mask": "bool (H, 1, S)", "layout": "expanded"},
    "add -inf (N, S)": {"mask": "add -inf (N, S)"},
    "add -inf (B, 1, N, S), causal, window": {"mask": "add -inf (B, 1, N, S)", "is_causal": True, "window": 9},
    "add min (B, 1, N, S), causal": {"mask": "add min (B, 1, N, S)", "is_causal": True},
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "causal": {"documents": (5, 1, 130, 14), "is_causal": True},
    "not causal": {"documents": (128, 0, 22)},
    "causal, window": {"documents": (100, 50), "is_causal": True, "window": 9},
}
CASES = {name: replace(TWO_BLOCKS, **options) for name, options in OPTIONS.items()} | {
    f"documents, {name}": replace(PACKED, **options) for name, options in DOCUMENTS.items()
}
# torch compiles a kernel for each, which takes a second.
COMPILED_IN_SHORT_RUN = (
    "causal",
    "3 signal heads to a noise map, λ for each token",
    "20 queries, expanded layout, shared keys, mask by head, scale",
    "bool (B, 1, 1, S), causal",
    "documents, causal, window",
)
HALF = [("causal", torch.bfloat16), ("causal", torch.float16), ("add -inf (N, S)", torch.bfloat16)]


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What compiled FlexAttention gave. Uncompiled it would warn, and warnings are errors here."""
    outputs: list[Tensor] = []
    compile_ = flex._compiled

    def spy(*fixed: Any) -> Callable[..., Tensor]:
        def attend(*arguments: Any) -> Tensor:
            outputs.append(compile_(*fixed)(*arguments))
            return outputs[-1]

        return attend

    monkeypatch.setattr(flex, "_compiled", spy)
    return outputs


def forward(problem: Problem, **more: Any) -> Tensor:
    return diff_attention(problem.q, problem.k, problem.v, problem.lam, **{**problem.options, **more}, backend="flex")


@pytest.mark.parametrize(
    ("name", "dtype"),
    short_run(
        [*((name, torch.float32) for name in CASES), *HALF],
        [*((name, torch.float32) for name in COMPILED_IN_SHORT_RUN), HALF[0]],
    ),
    ids=str,
)
def test_output(name: str, dtype: torch.dtype, compiled_calls: list[Tensor]) -> None:
    problem, expected = prepared(replace(CASES[name], dtype=dtype))
    out = forward(problem)
    assert len(compiled_calls) == 2
    assert out.dtype == dtype
    expected.check_output(out)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_channels_may_lie_apart(name: str, compiled_calls: list[Tensor]) -> None:
    """By two numbers, or by a whole sequence: the kernel that is compiled for channels side by side gets just those."""
    problem = build(CASES["causal"])
    expected, x = forward(problem), getattr(problem, name)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for view in (torch.stack((x, x + 1), dim=-1)[..., 0], x.mT.contiguous().mT):
        assert view.stride(-1) > 1
        assert torch.equal(forward(replace(problem, **{name: view})), expected)
    assert len(compiled_calls) == 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# BlockMasks of the caller's own.


def striped(step: int) -> Callable[..., Tensor]:
    """Two heads in turn see only every so many keys back; the last sequence sees nothing before key 70."""

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & ((i - j) % (step + h % 2) == 0) & ((b == 0) | (j >= 70))

    return mask_mod


@pytest.fixture(scope="module")
def stripes() -> BlockMask:
    return create_block_mask(striped(3), 2, 4, 150, 150, device="cpu")


@pytest.mark.parametrize("kind", short_run(["causal", "padding", "block mask"], ["padding"]))
def test_what_is_hidden_changes_nothing(kind: str, stripes: BlockMask) -> None:
    """NaN in padding, in key 100 of one head and in value 101 of another: zeros to all that do not see them."""
    problem = build(TWO_BLOCKS)
    hidden = torch.zeros(2, 150, dtype=torch.bool)
    hidden[0, 130:] = kind == "padding"
    options = {
        "causal": {"is_causal": True},
        "padding": {"is_causal": True, "attn_mask": ~hidden[:, None, None]},
        "block mask": {"attn_mask": stripes},
    }[kind]
    answers = []
    for value in (0.0, float("nan")):
        k, v = problem.k.masked_fill(hidden[:, None, None, :, None], value), problem.v.clone()
        v.masked_fill_(hidden[:, None, :, None], value)
        k[1, 0, :, 100] = v[1, 1, 101] = value
        with torch.no_grad():
            answers.append(diff_attention(problem.q, k, v, 0.7, **options, backend="flex"))
    zeros, spoilt = answers
    allowed = torch.ones(2, 4, 150, 150, dtype=torch.bool).tril()
    if kind == "block mask":
        allowed = create_mask(stripes.mask_mod, 2, 4, 150, 150, device="cpu")
    seeing = torch.zeros(2, 4, 150, dtype=torch.bool)
    seeing[1, :2], seeing[1, 2:] = allowed[1, :2, :, 100], allowed[1, 2:, :, 101]
    assert 0 < seeing[1].sum() < seeing[1].numel()
    assert spoilt[seeing].isnan().all()
    assert torch.equal(spoilt[~seeing], zeros[~seeing])


@pytest.mark.parametrize("backend", ["flex", "auto"])
def test_a_block_mask_hides_what_a_tensor_would(backend: str, stripes: BlockMask, compiled_calls: list[Tensor]) -> None:
    problem = build(TWO_BLOCKS)
    axes = [
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate((2, 4, 150, 150))
    ]
    mask = striped(3)(*axes)
    assert not mask.any(-1).all()
    arguments = problem.q, problem.k, problem.v, problem.lam
    out = diff_attention(*arguments, attn_mask=stripes, backend=backend)
    assert len(compiled_calls) == 2
    expected = diff_attention(*arguments, attn_mask=mask, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    assert not out[~mask.any(-1)].any()


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "cpu"])
def test_other_backends_take_no_block_mask(backend: str, stripes: BlockMask) -> None:
    problem = build(TWO_BLOCKS)
    with pytest.raises(ValueError, match=f"'{backend}' cannot run .*BlockMask .*'flex'"):
        diff_attention(problem.q, problem.k, problem.v, 0.5, attn_mask=stripes, backend=backend)
    with pytest.raises(TypeError, match=r"attn_mask must be a tensor.* BlockMask"):
        diff_attention_maps(problem.q, problem.k, 0.5, attn_mask=stripes)


@pytest.mark.parametrize(
    "more",
    [{"is_causal": True}, {"window": 3}, {"cu_seqlens": torch.tensor([0, 150])}],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("backend", ["flex", "auto"])
def test_a_block_mask_stands_alone(backend: str, more: dict[str, Any], stripes: BlockMask) -> None:
    problem = build(PACKED)
    with pytest.raises(ValueError, match=r"BlockMask.*mask_mod"):
        diff_attention(problem.q, problem.k, problem.v, 0.5, attn_mask=stripes, backend=backend, **more)


@pytest.mark.parametrize("sizes", [(3, 1, 150, 150), (2, 2, 150, 150), (1, 1, 149, 150), (1, 1, 150, 256)], ids=str)
def test_a_block_mask_of_another_shape_is_refused(sizes: tuple[int, int, int, int]) -> None:
    problem = build(TWO_BLOCKS)
    mask = create_block_mask(striped(3), *sizes, device="cpu")
    with pytest.raises(ValueError, match=r"BlockMask must be .*\(2, 4, 150, 150\), got"):
        forward(problem, attn_mask=mask)


# What it does not do.


@pytest.mark.parametrize("tensor", ["q", "k", "v", "lam"])
def test_gradients_on_the_cpu_are_refused(tensor: str, stripes: BlockMask) -> None:
    """By auto as well, where no other backend takes the mask."""
    problem = build(CASES["causal"])
    problem = replace(problem, **{tensor: getattr(problem, tensor).clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"'flex' cannot run .*no backward on the CPU"):
        forward(problem)
    with pytest.raises(ValueError, match=r"'flex' cannot run .*no backward on the CPU"):
        diff_attention(problem.q, problem.k, problem.v, problem.lam, attn_mask=stripes)
    with torch.no_grad():
        assert not forward(problem).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_a_learned_mask_and_forward_mode_are_refused() -> None:
    problem = build(CASES["causal"])
    mask = torch.zeros(150, 150, requires_grad=True)
    with pytest.raises(ValueError, match=r"'flex' cannot run .*gradient for attn_mask"):
        forward(problem, attn_mask=mask)
    with pytest.raises(ValueError, match=r"'flex' cannot run .*forward mode"):
        torch.func.jvp(lambda q: forward(replace(problem, q=q)), (problem.q,), (problem.q,))


# Compilation.


@torch._dynamo.config.patch(recompile_limit=1)
def test_torch_raises_where_it_would_run_uncompiled() -> None:
    """Past its limit of compilations torch would hold all scores, without a word."""
    flex._compiled.cache_clear()
    problem = build(TWO_BLOCKS)
    forward(problem, attn_mask=create_block_mask(striped(5), None, None, 150, 150, device="cpu"))
    with pytest.raises(FailOnRecompileLimitHit):
        forward(problem, attn_mask=create_block_mask(striped(7), None, None, 150, 150, device="cpu"))


@pytest.mark.all
@torch._dynamo.config.patch(recompile_limit=1)
def test_caches_of_other_capacities_are_compiled_apart() -> None:
    for capacity in (32, 40):
        k, v = (torch.randn(1, 2, capacity, 16)[:, :, :32] for _ in range(2))
        maps = k.unflatten(-1, (2, 8)).transpose(2, 3)
        first, second = (
            diff_attention(torch.ones(1, 2, 2, 1, 8), maps, v, 0.5, backend=b) for b in ("flex", "reference")
        )
        torch.testing.assert_close(first, second)


@pytest.fixture
def cold(cold: None) -> Iterator[None]:
    flex._compiled.cache_clear()
    yield
    flex._compiled.cache_clear()


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    "name", short_run(["causal", "bool (B, 1, 1, S), causal", "documents, causal"], ["bool (B, 1, 1, S), causal"])
)
def test_part_of_the_callers_compilation(name: str, compiled_calls: list[Tensor]) -> None:
    problem, expected = prepared(CASES[name])
    out = torch.compile(forward, fullgraph=True, backend="aot_eager")(problem)
    assert not compiled_calls
    torch.testing.assert_close(out, torch.from_numpy(expected.values["out"]).float(), atol=1e-5, rtol=1e-4)


# On CUDA, where it has a backward.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name != "odd widths"])
def test_output_and_gradients_on_cuda(name: str, dtype: torch.dtype, compiled_calls: list[Tensor]) -> None:
    problem, expected = prepared(replace(CASES[name], dtype=dtype))
    answer = problem.to("cuda").solve(diff_attention, backend="flex")
    assert len(compiled_calls) == 2
    expected.check({name: value.cpu() for name, value in answer.items()})


@pytest.mark.gpu
@pytest.mark.usefixtures("cold")
def test_many_lengths_on_cuda_take_few_compilations() -> None:
    """Lengths are left open from the second on: decoding does not compile for every token."""
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    lengths = range(200, 230)
    for length in lengths:
        problem = build(replace(TWO_BLOCKS, queries=1, keys=length, is_causal=True)).to("cuda")
        torch.testing.assert_close(
            forward(problem),
            diff_attention(problem.q, problem.k, problem.v, problem.lam, is_causal=True, backend="reference"),
            atol=1e-4,
            rtol=1e-3,
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4
