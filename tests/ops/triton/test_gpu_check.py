"""The check of the Triton kernels before `auto` takes them, with a device made up and kernels that fail in each way."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_transformer import diff_attention
from diff_transformer.ops import backends
from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.triton import gpu_check, triton_backend
from diff_transformer.ops.triton.gpu_check import DECODING, FORWARD, TRAINING, Family, reason_against_family
from faked_cuda import fake_device, request_on_cuda

CPU = torch.device("cpu")
ONE_QUERY = next(iter(DECODING))


def right(request: Request, norm: Norm) -> Tensor:
    """What kernels without a mistake give."""
    assert norm.factor == 1.0
    return rms_norm(reference_attention(request), norm.weight, norm.eps)


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that are right, on a device made up; the passes that were checked, in order."""
    fake_device(monkeypatch)
    done: list[str] = []
    compare = gpu_check._compare

    def recorded(family: Family, device: torch.device) -> str | None:
        done.append(family.pass_)
        return compare(family, device)

    monkeypatch.setattr(gpu_check, "_compare", recorded)
    monkeypatch.setattr(gpu_check, "triton_attention", right)
    return done


class OutOfResources(Exception):  # noqa: N818
    """Named as triton's."""


def one_row_wrong(request: Request, norm: Norm) -> Tensor:
    """The last queries lose a key: by far less than the largest output."""
    out = right(request, norm)
    shift = torch.zeros_like(out)
    shift[..., -3:, :] = 0.3 * out[..., -3:, :].detach().abs().mean()
    return out + shift


def nan_at_the_end(request: Request, norm: Norm) -> Tensor:
    out = right(request, norm)
    return torch.where(torch.arange(out.shape[-2])[:, None] == out.shape[-2] - 1, torch.nan, out)


def too_large(request: Request, norm: Norm) -> Tensor:
    raise OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448.\nmore lines")


FAILURES: dict[str, tuple[Any, str]] = {
    "wrong numbers": (one_row_wrong, "the output is wrong"),
    "NaN": (nan_at_the_end, "the output is wrong, inf times"),
    "out of resources": (too_large, r"OutOfResources: out of resource: shared memory.*232448.\)"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_kernels_that_fail_are_not_taken_and_it_is_said_once(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, message = FAILURES[failure]
    monkeypatch.setattr(gpu_check, "triton_attention", fake)
    with pytest.warns(UserWarning, match=f"'triton' failed its check on NVIDIA Faked.*float16.*{message}") as caught:
        assert [backends.choose(request_on_cuda()) for _ in range(2)] == ["sdpa"] * 2
    assert len(caught) == 1


def test_each_family_is_checked_once_and_by_itself(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of one keeps the others."""
    monkeypatch.setattr(
        gpu_check,
        "triton_attention",
        lambda request, norm: right(request, norm) * (2.0 if request.needs_gradient else 1.0),
    )
    with pytest.warns(UserWarning, match="training: the output is wrong"):
        assert backends.choose(request_on_cuda(gradient=True)) == "sdpa"
    for _ in range(2):
        assert backends.choose(request_on_cuda()) == "triton"
        assert backends.choose(request_on_cuda(d=64)) == "triton"
        assert backends.choose(request_on_cuda(d=50)) == "triton"  # of the family of 64
        assert backends.choose(request_on_cuda(ratio=2)) == "triton"
    assert checks == [TRAINING, FORWARD, FORWARD, FORWARD]


def test_float32_is_checked_again_where_torch_multiplies_it_otherwise(
    checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in ("ieee", "tf32", "ieee"):
        monkeypatch.setattr(gpu_check, "precision_of", lambda _, precision=precision: precision)
        assert backends.choose(request_on_cuda(dtype=torch.float32)) == "triton"
    assert checks == [FORWARD, FORWARD]


@pytest.mark.parametrize(
    ("sizes", "pass_"),
    [
        ({"n": 1, "s": 900}, ONE_QUERY),
        ({"n": 8, "s": 900}, "decoding 16 rows"),
        ({"n": 9, "s": 63}, FORWARD),
        ({"n": 9, "s": 64}, "decoding 32 rows"),
        ({"n": 32, "s": 64}, "decoding 64 rows"),
        ({"n": 33, "s": 64}, FORWARD),
        ({"n": 9, "s": 64, "dtype": torch.float32}, FORWARD),
        ({"n": 1, "s": 64, "gradient": True}, TRAINING),
    ],
    ids=str,
)
def test_which_pass_is_checked(checks: list[str], sizes: dict[str, Any], pass_: str) -> None:
    assert backends.choose(request_on_cuda(**sizes)) == "triton"
    assert checks == [pass_]


@pytest.mark.parametrize("name", ["lam", "q", "v", "norm_weight"])
def test_every_gradient_is_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(request: Request, norm: Norm) -> Tensor:
        leaf = norm.weight if name == "norm_weight" else getattr(request, name)
        leaf.register_hook(lambda gradient: gradient * 1.5)
        return right(request, norm)

    monkeypatch.setattr(gpu_check, "triton_attention", wrong)
    reason = reason_against_family(Family(torch.float32, 16, 32, "", TRAINING), CPU)
    assert str(reason).startswith(f"the gradient of {name} is wrong")


def test_the_output_of_a_norm_does_not_hide_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(request: Request, norm: Norm) -> Tensor:
        return rms_norm(2 * reference_attention(request), norm.weight, norm.eps)

    monkeypatch.setattr(gpu_check, "triton_attention", doubled)
    assert "the output is wrong" in str(reason_against_family(Family(torch.bfloat16, 16, 32, "", FORWARD), CPU))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("mask", "in_groups"), [("", False), ("boolean", False), ("additive", False), ("boolean", True)]
)
@pytest.mark.parametrize("pass_", [FORWARD, TRAINING, *DECODING])
def test_the_real_kernels_pass_in_the_interpreter(
    mask: str, in_groups: bool, pass_: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if not triton_backend.interpreted():
        pytest.skip("there is a GPU: the kernels do not run on the CPU")
    monkeypatch.setattr(gpu_check, "triton_attention", triton_backend.triton_attention)
    assert reason_against_family(Family(dtype, 16, 32, mask, pass_, in_groups), CPU) is None


def test_a_full_device_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(request: Request, norm: Norm) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_check, "triton_attention", full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(request_on_cuda()) == "sdpa"
    monkeypatch.setattr(gpu_check, "triton_attention", right)
    assert backends.choose(request_on_cuda()) == "triton"


def test_nothing_is_checked_while_a_graph_is_captured(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert backends.choose(request_on_cuda()) == "sdpa"
    assert checks == []
    assert backends.choose(request_on_cuda()) == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backends.choose(request_on_cuda()) == "triton"  # known by now


def test_the_kernels_can_be_switched_off(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFF_TRANSFORMER_TRITON", "0")
    assert backends.choose(request_on_cuda()) == "sdpa"
    assert checks == []
    assert gpu_check.status() == "switched off by DIFF_TRANSFORMER_TRITON=0"


def test_the_check_disturbs_nothing() -> None:
    """Neither the program's random numbers, nor autograd, nor autocast, nor a transformation around the call."""
    before = torch.get_rng_state()
    family = Family(torch.float32, 16, 32, "", TRAINING)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert reason_against_family(family, CPU) is None
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(reason_against_family(family, CPU))
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.vmap(loss)(torch.ones(3, 2))
    torch.fx.experimental.proxy_tensor.make_fx(loss)(torch.ones(3))
    assert seen == [None] * 3
    assert torch.equal(before, torch.get_rng_state())


def test_torch_compile_keeps_the_verdict_as_a_constant(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, though nothing of the check can be traced. The request is on the CPU here."""
    monkeypatch.setattr(backends, "available_to_auto", lambda: False)
    monkeypatch.setattr(backends, "_loses_gradient", lambda name, request: not gpu_check.kernels_are_right(request))
    torch._dynamo.reset()
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    q, v = torch.randn(1, 1, 2, 5, 16), torch.randn(1, 1, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, q, v, 0.5), diff_attention(q, q, v, 0.5))
    assert checks == [FORWARD, ONE_QUERY, "decoding 16 rows"]
    torch._dynamo.reset()
