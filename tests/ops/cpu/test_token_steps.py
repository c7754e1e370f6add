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


@torch.no_grad()
def test_lambda_is_known_by_its_numbers() -> None:
    vectors, lam = [normal(8) for _ in range(4)], torch.tensor([0.7])
    vectors[1] = vectors[1] + 1
    known = torch.cat((*vectors, torch.tensor([0.2]), lam))
    found = token_step("known_lambda", *vectors, 0.2, known)
    assert (found.shape, found.item()) == ((), lam.item())
    found.zero_()  # a caller's own
    assert token_step("known_lambda", *vectors, 0.2, known).item() == lam.item()
    others = [[*vectors[:i], vectors[i] + vectors[i].abs() * 1e-7, *vectors[i + 1 :]] for i in range(4)]
    others += [[x.double() for x in vectors], [x[:7] for x in vectors], [*vectors[:3], vectors[3].repeat(2)]]
    for changed in others:
        assert token_step("known_lambda", *changed, 0.2, known) is None
    assert token_step("known_lambda", *vectors, 0.3, known) is None
    assert token_step("known_lambda", *vectors, 0.2, known.double()) is None
    assert token_step("known_lambda", *vectors, 0.2, None) is None


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64, torch.int8], ids=str)
@torch.no_grad()
def test_tokens_are_written_behind_those_seen(dtype: torch.dtype) -> None:
    memory, rest = torch.full((2, 3, 9, 4), 7).to(dtype), normal(2, 3, 9, 0).to(dtype)
    seen, values = memory[:, :, 2:5], rest[:, :, :3]
    due = seen.clone()
    for count in (1, 2):
        new = (10 * normal(2, count, 3, 4)).to(dtype).transpose(1, 2)
        seen, values = token_step("appended", seen, memory, new, values, rest, rest[:, :, :count])
        due = torch.cat((due, new), 2)
        assert torch.equal(seen, due)
        assert seen.data_ptr() == memory[:, :, 2:].data_ptr()
        assert seen._base is memory
        assert values.shape == (2, 3, seen.shape[2], 0)
    assert torch.equal(memory[:, :, [0, 1, 8]], torch.full((2, 3, 3, 4), 7).to(dtype))
    fits = {"seen": seen, "memory": memory, "new": new[:, :, :1]}
    for change in (
        {"new": new},
        {"seen": seen.clone()},
        {"seen": seen[:1]},
        {"seen": seen[:, :, :, :3]},
        {"memory": None},
        {"memory": memory.double() if dtype != torch.float64 else memory.float()},
        {"new": new[:, :2, :1]},
        {"new": new[:, :, :1, :3]},
        {"new": new[:, :, :1].repeat(1, 1, 1, 2)[..., ::2]},
        {"new": new[0, :, :1]},
        {"new": new[:, :, :1].to(torch.uint8)},
    ):
        of_keys = tuple((fits | change).values())
        assert token_step("appended", *of_keys, values, rest, rest[:, :, :1]) in (None, (None, None)), change
        assert token_step("appended", *(rest[:, :, :1], rest, rest[:, :, :1]), *of_keys) in (None, (None, None))
    before = memory.clone()
    assert token_step("appended", *fits.values(), rest, rest, rest[:, :, :1]) == (None, None)  # no room for values
    assert torch.equal(memory, before)


@torch.no_grad()
def test_what_the_product_in_eight_bits_does_not_take() -> None:
    fits = {"x": normal(1, 8), "weight": torch.ones(6, 8, dtype=torch.int8), "scales": torch.ones(6), "rows": 16}
    assert token_step("multiplied_int8", *fits.values()).shape == (1, 6)
    assert token_step("multiplied_int8", *(fits | {"x": normal(2, 3, 1, 8)}).values()).shape == (2, 3, 1, 6)
    for change in (
        {"x": normal(17, 8)},
        {"x": normal(1, 7)},
        {"x": normal(0, 8)},
        {"x": normal(8, 2).T},
        {"x": normal(1, 8).half()},
        {"x": torch.tensor(1.0)},
        {"weight": torch.ones(6, 8)},
        {"weight": torch.ones(8, 6, dtype=torch.int8).T},
        {"weight": torch.ones(6, 8, 1, dtype=torch.int8)},
        {"weight": torch.ones(0, 8, dtype=torch.int8), "scales": torch.ones(0)},
        {"scales": torch.ones(6).bfloat16()},
        {"scales": torch.ones(5)},
        {"scales": torch.ones(12)[::2]},
    ):
        assert token_step("multiplied_int8", *(fits | change).values()) is None, change


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
