"""The check of the Triton kernels before `auto` takes them, with a device made up and kernels that fail in each way."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_transformer import diff_attention
from diff_transformer.ops import backends, kernel_check
from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.device_findings import VERDICTS, findings_of
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.kernel_check import DECODING, FORWARD, ONE_QUERY, TRAINING, KernelClass, outcome
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.triton import kernel_arguments
from diff_transformer.ops.triton.kernel_arguments import IN_LAUNCHES, IN_ONE_PASS
from faked_cuda import fake_device, forget, request_on_cuda

CPU = torch.device("cpu")
FailingKernels = Callable[..., None]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    fake_device(monkeypatch, tmp_path)
    yield
    forget(monkeypatch)


def right(request: Request, norm: Norm) -> Tensor:
    """What kernels without a mistake give."""
    out = rms_norm(reference_attention(request), norm.weight, norm.eps)
    assert norm.factor == 1.0
    return out


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that are right; the classes that were checked, in order."""
    done: list[str] = []
    find_out = kernel_check.outcome

    def recorded(kernels: KernelClass, device: torch.device) -> str | None:
        done.append(kernels.pass_)
        return find_out(kernels, device)

    monkeypatch.setattr(kernel_check, "outcome", recorded)
    monkeypatch.setattr(kernel_check, "triton_attention", right)
    return done


class OutOfResources(Exception):  # noqa: N818
    """Named as triton's."""


class CompilationError(Exception):
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


def does_not_compile(request: Request, norm: Norm) -> Tensor:
    raise CompilationError("at 12:4: no such operation")


FAILURES: dict[str, tuple[Any, str]] = {
    "wrong numbers": (one_row_wrong, "the output is wrong"),
    "NaN": (nan_at_the_end, "the output is wrong, inf times"),
    "out of resources": (too_large, r"OutOfResources: out of resource: shared memory.*232448.\)"),
    "does not compile": (does_not_compile, "CompilationError: at 12:4"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_kernels_that_fail_are_not_taken_and_it_is_said_once(
    failure: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, message = FAILURES[failure]
    monkeypatch.setattr(kernel_check, "triton_attention", fake)
    with pytest.warns(UserWarning, match=f"'triton' failed its check on NVIDIA Faked.*float16.*{message}") as caught:
        chosen = [backends.choose(request_on_cuda(gradient=gradient)) for gradient in (False, True, False)]
    assert chosen == ["sdpa"] * 3
    assert len(caught) == 1
    (file,) = (tmp_path / "devices").iterdir()
    assert str(file) in str(caught[0].message)
    assert file.read_text(encoding="utf-8").count("float16, d 16, dv 32") == 2
    # Another process reads it, says it once, and does not try again.
    forget(monkeypatch)
    monkeypatch.setattr(kernel_check, "outcome", lambda *_: pytest.fail("checked again"))
    with pytest.warns(UserWarning, match="failed its check"):
        assert backends.choose(request_on_cuda()) == "sdpa"
    assert "not used: float16, d 16, dv 32, forward: " in kernel_check.status(0)


def test_kernels_that_are_right_are_taken_and_checked_once(
    checks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kernel_check.status(0).startswith("not checked yet")
    for _ in range(2):
        assert backends.choose(request_on_cuda()) == "triton"
        assert backends.choose(request_on_cuda(gradient=True)) == "triton"
    assert checks == [FORWARD, TRAINING]
    assert "right: float16, d 16, dv 32, forward; float16, d 16, dv 32, training" in kernel_check.status(0)
    forget(monkeypatch)
    assert backends.choose(request_on_cuda()) == "triton"
    assert checks == [FORWARD, TRAINING]
    # Of another version nothing is known.
    forget(monkeypatch)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert backends.choose(request_on_cuda()) == "triton"
    assert checks == [FORWARD, TRAINING, FORWARD]
    assert len(list((tmp_path / "devices").iterdir())) == 2


def test_each_class_is_checked_by_itself(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of one keeps the others."""
    monkeypatch.setattr(
        kernel_check,
        "triton_attention",
        lambda request, norm: right(request, norm) * (2.0 if request.needs_gradient else 1.0),
    )
    with pytest.warns(UserWarning, match="training: the output is wrong"):
        assert backends.choose(request_on_cuda(gradient=True)) == "sdpa"
    assert backends.choose(request_on_cuda()) == "triton"
    assert backends.choose(request_on_cuda(d=64)) == "triton"
    assert backends.choose(request_on_cuda(d=50)) == "triton"  # of the class of 64
    assert backends.choose(request_on_cuda(ratio=2)) == "triton"
    assert checks == [TRAINING, FORWARD, FORWARD, FORWARD]
    assert "float16, d 16, dv 32, in groups, forward" in kernel_check.status(0)


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


@pytest.mark.parametrize("name", ["lam", "q", "v", "the norm's weight"])
def test_every_gradient_is_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(request: Request, norm: Norm) -> Tensor:
        leaf = norm.weight if name == "the norm's weight" else getattr(request, name)
        leaf.register_hook(lambda gradient: gradient * 1.5)
        return right(request, norm)

    monkeypatch.setattr(kernel_check, "triton_attention", wrong)
    reason = outcome(KernelClass(torch.float32, 16, 32, "", TRAINING), CPU)
    assert str(reason).startswith(f"the gradient of {'λ' if name == 'lam' else name} is wrong")


def test_the_output_of_a_norm_does_not_hide_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(request: Request, norm: Norm) -> Tensor:
        return rms_norm(2 * reference_attention(request), norm.weight, norm.eps)

    monkeypatch.setattr(kernel_check, "triton_attention", doubled)
    assert "the output is wrong" in str(outcome(KernelClass(torch.bfloat16, 16, 32, "", FORWARD), CPU))


@pytest.mark.parametrize(
    ("mask", "in_groups"), [("", False), ("boolean", False), ("additive", False), ("boolean", True)]
)
@pytest.mark.parametrize("pass_", [FORWARD, TRAINING, ONE_QUERY, *DECODING])
def test_the_real_kernels_pass_in_the_interpreter(mask: str, in_groups: bool, pass_: str) -> None:
    pytest.importorskip("triton")
    assert outcome(KernelClass(torch.float16, 16, 32, mask, pass_, in_groups), CPU) is None


def test_the_backward_in_one_pass_is_checked_by_itself(
    checks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is taken by a record and where bits may change, so the other may have been checked before."""
    record = tmp_path / "measured_backward.json"
    record.write_text(json.dumps({"90": {"narrow heads": {IN_ONE_PASS: 1.0, IN_LAUNCHES: 2.0}}}), encoding="utf-8")
    monkeypatch.setattr(kernel_arguments, "MEASURED_BACKWARD", record)
    kernel_arguments.measured_backwards.cache_clear()
    training, masked = request_on_cuda(gradient=True), torch.ones(1, 1, 1, 40, dtype=torch.bool)
    try:
        torch.use_deterministic_algorithms(True)
        assert kernel_check.kernels_are_right(training)
        torch.use_deterministic_algorithms(False)
        assert kernel_check.kernels_are_right(training)
        assert kernel_check.kernels_are_right(request_on_cuda(gradient=True, attn_mask=masked))
        assert kernel_check.kernels_are_right(request_on_cuda())
    finally:
        torch.use_deterministic_algorithms(False)
        kernel_arguments.measured_backwards.cache_clear()
    assert checks == [TRAINING, TRAINING, TRAINING, FORWARD]
    in_one_pass = [name for name in findings_of(0).of(VERDICTS) if name.endswith("in one pass")]
    assert in_one_pass == ["float16, d 16, dv 32, training, backward in one pass"]


def test_a_full_device_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(request: Request, norm: Norm) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel_check, "triton_attention", full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose(request_on_cuda()) == "sdpa"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(kernel_check, "triton_attention", right)
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
    assert kernel_check.status(0) == "switched off by DIFF_TRANSFORMER_TRITON=0"


def test_a_cache_that_cannot_be_read_or_written(
    checks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(file))
    assert [backends.choose(request_on_cuda()) for _ in range(2)] == ["triton"] * 2
    assert checks == [FORWARD]
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    forget(monkeypatch)
    assert backends.choose(request_on_cuda()) == "triton"
    (findings,) = (tmp_path / "cache" / "devices").iterdir()
    assert json.loads(findings.read_text(encoding="utf-8"))["about"]["device"] == "NVIDIA Faked"
    for damaged in ("{", "[]", '{"verdicts": 3}'):
        findings.write_text(damaged, encoding="utf-8")
        forget(monkeypatch)
        assert backends.choose(request_on_cuda()) == "triton"
    assert checks == [FORWARD] * 5


def test_the_check_disturbs_nothing(checks: list[str]) -> None:
    """Neither the program's random numbers, nor autograd, nor autocast, nor a transformation around the call."""
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert outcome(KernelClass(torch.float32, 16, 32, "", TRAINING), CPU) is None
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(outcome(KernelClass(torch.float32, 16, 32, "", TRAINING), CPU))
        return x.square().sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.vmap(loss)(torch.ones(3, 2))
    torch.fx.experimental.proxy_tensor.make_fx(loss)(torch.ones(3))
    assert seen == [None] * 3
    assert torch.equal(before, torch.get_rng_state())


def test_torch_compile_keeps_the_verdict_as_a_constant(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, though nothing of the check can be traced. The request is on the CPU here."""
    monkeypatch.setattr(backends, "available_to_auto", lambda: False)
    monkeypatch.setattr(
        backends, "padded_q_beats_blockwise", lambda request: not kernel_check.kernels_are_right(request)
    )
    torch._dynamo.reset()
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    q, v = torch.randn(1, 1, 2, 5, 16), torch.randn(1, 1, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, q, v, 0.5), diff_attention(q, q, v, 0.5))
    assert checks == [FORWARD, ONE_QUERY, "decoding 16 rows"]
    torch._dynamo.reset()
