"""The steps of a layer for a token that the CPU kernel's library takes at once: the bits of torch's operators."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from counted_operators import Operators
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.nn import DiffAttention, RMSNorm
from diff_transformer.ops import apply_rotary, rms_norm
from diff_transformer.ops.cpu import cpu_backend
from diff_transformer.ops.cpu.cpu_backend import available_to_auto, reason_against_cpu_kernel, token_step
from tiny_model import KINDS, sizes_for

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no kernel"),
]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    assert reason_against_cpu_kernel() is None
    if not available_to_auto():  # which takes it from AVX2 on
        pytest.skip("auto leaves the kernel aside on this processor")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_the_norm_has_its_bits(dtype: torch.dtype) -> None:
    for width in (1, 3, 8, 96, 100, 129, 1376, 5000):
        for shape in ((width,), (1, 1, width), (3, 2, width)):
            for size in (1e-3, 1.0, 300.0):
                x, weight = size * normal(*shape, dtype=dtype), normal(width, dtype=dtype)
                out = token_step("normed", x, weight, 1e-5)
                assert out.dtype == dtype
                assert torch.equal(out, rms_norm(x, weight, 1e-5)), (shape, size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "positions"), [(1, 1), (3, 1), (3, 3)])
@torch.no_grad()
def test_rotation_has_its_bits(batch: int, positions: int, dtype: torch.dtype) -> None:
    """Of 6 heads of queries and 4 of keys, two of which are cached side by side."""
    for d in (2, 8, 12, 128):
        q, k = normal(batch, 1, 6 * d, dtype=dtype), normal(batch, 1, 4 * d, dtype=dtype)
        cos, sin = normal(positions, 1, d, dtype=dtype), normal(positions, 2, d, dtype=dtype)[:, 1:].contiguous()
        queries, keys = token_step("rotated", q, k, cos, sin, 2 * d)
        tables = cos.unsqueeze(2), sin.unsqueeze(2)
        assert torch.equal(queries, apply_rotary(q.unflatten(-1, (6, d)), *tables))
        due = apply_rotary(k.unflatten(-1, (4, d)), *tables)
        assert torch.equal(keys, due.view(batch, 1, 2, 2 * d).transpose(1, 2))


def norm(**changes: Any) -> Any:
    arguments = {"x": normal(2, 8), "weight": normal(8), "eps": 1e-5} | changes
    return token_step("normed", *arguments.values())


def rotation(**changes: Any) -> Any:
    arguments = {"q": normal(2, 1, 16), "k": normal(2, 1, 8), "cos": normal(1, 1, 4), "sin": normal(1, 1, 4)}
    return token_step("rotated", *(arguments | {"width": 8} | changes).values())


class Another(Tensor):
    """A subclass, which may mean something else."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_they_do_not_take() -> None:
    assert norm() is None  # gradients are enabled
    with torch.no_grad():
        assert norm(weight=nn.Parameter(normal(8))) is not None
        for x in (
            normal(2, 8).half(),
            normal(2, 8).double(),
            normal(8, 2).T,
            normal(0, 8),
            normal(2, 9),
            normal(4096, 8),
        ):
            assert norm(x=x) is None
        for x in (normal(2, 8).as_subclass(Another), torch.nested.nested_tensor([normal(8)]), normal(2, 8).to("meta")):
            assert norm(x=x) is None
        for weight in (normal(8).bfloat16(), normal(8, 1), normal(1, 8), normal(4)):
            assert norm(weight=weight) is None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert norm() is None
        with Operators() as seen:
            assert norm() is None
        assert not seen.named("normed")
        x, weight = normal(2, 3, 8), normal(8)
        mapped = torch.vmap(lambda row: row if token_step("normed", row, weight, 1e-5) is None else None)(x)
    assert torch.equal(mapped, x)


@torch.no_grad()
def test_traces_of_torch_fx_hold_torchs_operators() -> None:
    weight, layer = normal(8), RMSNorm(8)
    assert "normed" not in make_fx(layer, pre_dispatch=True)(normal(2, 8)).code
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(layer)
    assert torch.equal(RMSNorm(8, eps=None)(weight), torch.nn.functional.rms_norm(weight, (8,)))


@torch.no_grad()
def test_tables_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="cos and sin must be as wide as x, d = 16"):
        DiffAttention(64, 4, 1).eval().project(normal(1, 1, 64), (normal(1, 1, 8), normal(1, 1, 8)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "q",
            (
                normal(2, 2, 16),
                normal(2, 1, 18),
                normal(2, 16),
                normal(2, 1, 16).bfloat16(),
                normal(2, 1, 32)[..., ::2],
            ),
        ),
        ("k", (normal(2, 2, 8), normal(2, 1, 12), normal(3, 1, 8), normal(2, 8), normal(2, 1, 8).half())),
        (
            "cos",
            (normal(1, 1, 3), normal(1, 1, 6), normal(3, 1, 4), normal(1, 2, 4), normal(1, 1, 1, 4), normal(1, 1, 0)),
        ),
        ("width", (0, -4, 6, 16)),
    ],
    ids=["q", "k", "cos", "width"],
)
@torch.no_grad()
def test_what_rotation_does_not_take(name: str, values: tuple[Any, ...]) -> None:
    assert rotation()[0] is not None
    for value in values:
        assert rotation(**{name: value}) == (None, None)
        if name == "cos":
            assert rotation(cos=value, sin=value) == (None, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_model_has_the_same_bits_with_and_without(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes_for(kind))).eval().to(dtype)
    ids = torch.randint(1, 29, (2, 9))
    taken: list[str] = []

    def answers() -> Tensor:
        past = model(ids[:, :7], use_cache=True).past_key_values
        return torch.cat([model(ids[:, i : i + 1], past_key_values=past).logits for i in (7, 8)], 1)

    def recorded(operator: str, *arguments: Any) -> Any:
        answer = token_step(operator, *arguments)
        taken.extend([operator] * isinstance(answer[0] if isinstance(answer, tuple) else answer, Tensor))
        return answer

    with monkeypatch.context() as patched:
        for module in ("attention", "layers"):
            patched.setattr(f"diff_transformer.nn.{module}.token_step", recorded)
        due = answers()
    assert "normed" in taken
    assert ("rotated" in taken) is (kind != "gdla")
    monkeypatch.setattr(cpu_backend, "_loaded", {"cpu"})
    assert torch.equal(answers(), due)
