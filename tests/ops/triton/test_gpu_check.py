"""The check of the Triton kernels before `auto` takes them, with a device made up and kernels that fail in each way."""

import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops import backends, flash
from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.triton import gpu_check, triton_backend
from diff_transformer.ops.triton.gpu_check import DECODING, FORWARD, TRAINING, Family, reason_against_family
from full_run import short_run

CPU = torch.device("cpu")
LENGTH, LONG_CACHE = 40, 64
ONE_QUERY = next(iter(DECODING))


def right(request: Request, norm: Norm) -> Tensor:
    """What kernels without a mistake give."""
    assert norm.factor == 1.0
    return rms_norm(reference_attention(request), norm.weight, norm.eps)


class Hopper:
    """A GPU made up, of which nothing is known yet: checks run on the CPU, at small sizes, with kernels that are right.

    Attributes:
        kernels: what runs in the place of the kernels.
        checked: the passes that were checked, in order.
        is_capturing: whether a graph is captured.
        capability: its compute capability.
    """

    def __init__(self) -> None:
        self.kernels: Callable[[Request, Norm], Tensor] = right
        self.checked: list[str] = []
        self.is_capturing = False
        self.capability = 9, 0

    def attend(self, request: Request, norm: Norm) -> Tensor:
        passes = {queries: name for name, queries in DECODING.items()} | {LENGTH: FORWARD}
        self.checked.append(TRAINING if request.needs_gradient else passes[request.n])
        return self.kernels(request, norm)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    device, compare = Hopper(), gpu_check._compare
    for place, name, value in (
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: device.capability),
        (torch.cuda, "get_device_name", lambda *_: "NVIDIA Faked"),
        (torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing),
        (gpu_check, "_compare", lambda family, _: compare(family, CPU)),
        (gpu_check, "LENGTH", LENGTH),
        (gpu_check, "LONG_CACHE", LONG_CACHE),
        (gpu_check, "_reasons", {}),
        (gpu_check, "triton_attention", device.attend),
    ):
        monkeypatch.setattr(place, name, value)
    monkeypatch.delenv(gpu_check.SWITCH, raising=False)
    return device


def chosen(
    n: int = LENGTH, s: int | None = None, *, d: int = 16, dtype: torch.dtype = torch.float16, ratio: int = 1,
    gradient: bool = False,
) -> str:  # fmt: skip
    """Which backend `auto` takes for tensors without numbers, on the device."""
    s = n if s is None else s
    with FakeTensorMode():
        q = torch.empty(1, 2 // ratio, ratio + 1, n, d, dtype=dtype, device="cuda", requires_grad=gradient)
        k, v = (torch.empty(*size, dtype=dtype, device="cuda") for size in ((1, 1, 2, s, d), (1, 1, s, 2 * d)))
        lam = torch.empty(1, 2, n, device="cuda")
    return backends.choose(Request(q, k, v, lam, None, True, 1.0, None, None))


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
def test_kernels_that_fail_are_not_taken_and_it_is_said_once(failure: str, gpu: Hopper) -> None:
    gpu.kernels, message = FAILURES[failure]
    with pytest.warns(UserWarning, match=f"'triton' failed its check on NVIDIA Faked.*float16.*{message}") as caught:
        assert [chosen() for _ in range(2)] == ["sdpa"] * 2
    assert len(caught) == 1


def test_each_family_is_checked_once_and_by_itself(gpu: Hopper) -> None:
    """A failure of one keeps the others."""
    gpu.kernels = lambda request, norm: right(request, norm) * (2.0 if request.needs_gradient else 1.0)
    with pytest.warns(UserWarning, match="training: the output is wrong"):
        assert chosen(gradient=True) == "sdpa"
    for _ in range(2):
        # A width of 50 is of the family of 64.
        assert [chosen(), chosen(d=64), chosen(d=50), chosen(ratio=2)] == ["triton"] * 4
    assert chosen(dtype=torch.float64) == "sdpa"  # which the kernels do not compute
    assert gpu.checked == [TRAINING, FORWARD, FORWARD, FORWARD]


def test_many_queries_on_hopper_and_blackwell_go_to_flash_attention_4_once_it_is_right(
    gpu: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed, from the length at which it was timed; where it fails its check, triton takes them."""
    monkeypatch.setattr(flash, "is_installed", lambda package: True)

    def attend(backend: str, request: Request, norm: Norm, *, compiles: bool) -> Tensor:
        assert backend == "fa4"
        assert not compiles  # torch.compile, which may wait for the check, holds the lock of a second compilation
        return gpu.attend(request, norm)

    monkeypatch.setattr(gpu_check, "flash_attention", attend)
    many: dict[str, Any] = {"d": 64, "dtype": torch.bfloat16}
    assert [chosen(4096, **many), chosen(4096, **many, gradient=True), chosen(4096, **many | {"d": 128})] == ["fa4"] * 3
    others: list[dict[str, Any]] = [{"dtype": torch.float16}, {"dtype": torch.float32}, {"d": 80}]
    assert [chosen(4096, **many | other) for other in others] == ["triton"] * 3  # which were not timed
    assert [chosen(4095, **many), chosen(1, 8192, **many)] == ["triton"] * 2
    gpu.capability = 10, 0
    assert [chosen(4096, **many), chosen(4096, **many | {"d": 128})] == ["fa4", "triton"]
    gpu.capability = 12, 0
    assert chosen(4096, **many) == "triton"
    gpu.capability, gpu.kernels = (9, 0), one_row_wrong
    message = "'fa4' failed its check .* 'triton' or 'sdpa' .* by fa4: the output is wrong"
    with pytest.warns(UserWarning, match="'triton' failed"), pytest.warns(UserWarning, match=message):
        assert chosen(4096, **many, ratio=2) == "sdpa"
    monkeypatch.setenv(gpu_check.SWITCH, "0")
    assert chosen(4096, **many) == "sdpa"


def test_float32_is_checked_again_where_torch_multiplies_it_otherwise(gpu: Hopper) -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    for precision in ("ieee", "tf32", "ieee"):
        settings.fp32_precision = precision
        try:
            assert chosen(dtype=torch.float32) == "triton"
        finally:
            settings.fp32_precision = before
    assert gpu.checked == [FORWARD, FORWARD]


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
def test_which_pass_is_checked(gpu: Hopper, sizes: dict[str, Any], pass_: str) -> None:
    assert chosen(**sizes) == "triton"
    assert gpu.checked == [pass_]


@pytest.mark.parametrize("name", ["lam", "q", "v", "norm_weight"])
def test_every_gradient_is_looked_at(name: str, gpu: Hopper) -> None:
    def wrong(request: Request, norm: Norm) -> Tensor:
        leaf = norm.weight if name == "norm_weight" else getattr(request, name)
        leaf.register_hook(lambda gradient: gradient * 1.5)
        return right(request, norm)

    gpu.kernels = wrong
    reason = reason_against_family(Family(torch.float32, 16, 32, "", TRAINING), CPU)
    assert str(reason).startswith(f"the gradient of {name} is wrong")


def test_the_output_of_a_norm_does_not_hide_a_wrong_scale(gpu: Hopper) -> None:
    gpu.kernels = lambda request, norm: rms_norm(2 * reference_attention(request), norm.weight, norm.eps)
    assert "the output is wrong" in str(reason_against_family(Family(torch.bfloat16, 16, 32, "", FORWARD), CPU))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("mask", "in_groups", "has_signal"),
    [("", False, True), ("boolean", False, False), ("additive", False, False), ("boolean", True, True)],
)
@pytest.mark.parametrize("pass_", short_run([FORWARD, TRAINING, *DECODING], [FORWARD, ONE_QUERY]))
def test_the_real_kernels_pass_in_the_interpreter(
    mask: str, in_groups: bool, has_signal: bool, pass_: str, dtype: torch.dtype, gpu: Hopper
) -> None:
    pytest.importorskip("triton")
    if not triton_backend.interpreted():
        pytest.skip("there is a GPU: the kernels do not run on the CPU")
    gpu.kernels = triton_backend.triton_attention
    family = Family(dtype, 16, 32, mask, pass_, in_groups, has_signal=has_signal)
    assert reason_against_family(family, CPU) is None
    if pass_ in DECODING:  # rows of int8, too
        assert reason_against_family(family._replace(in_eight_bits=True), CPU) is None


KEYS = """
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    from diff_transformer.ops.attention_request import Norm, Request
    from diff_transformer.ops.packed import pack, packed_views
    from diff_transformer.ops.triton.gpu_check import DECODING, FORWARD, TRAINING, Family, _case, _in_eight_bits
    from diff_transformer.ops.triton.kernel_arguments import has_few_queries, problem_of
    from diff_transformer.ops.triton.launch import plan_backward, plan_decode, plan_forward

    backend, (one, sixteen, _, chunk) = CUDABackend(GPUTarget("cuda", 90, 32)), DECODING

    def binaries(request, weight, training):
        problem, norm = problem_of(request, 90), Norm(weight, 1e-5, 0.8)
        if not training and has_few_queries(problem):
            launches = plan_decode(problem, norm, 264)[0]
        else:
            launches, out, saved = plan_forward(problem, norm, training)
            launches += plan_backward(torch.empty_like(out), problem, norm, saved)[0] if training else []
        for each in launches:
            bind = create_function_from_signature(each.kernel.signature, each.kernel.params, backend)
            yield each.kernel.fn.__name__, str(bind(**each.arguments, **each.options)[1:])

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    for pass_, batch, n, s, key_heads, d, bits in (
        (TRAINING, 1, 4096, 4096, 8, 64, 16), (TRAINING, 2, 1024, 1024, 2, 128, 16),
        (FORWARD, 3, 1000, 1000, 8, 64, 16), (FORWARD, 1, 777, 777, 4, 128, 16), (one, 1, 1, 4000, 8, 64, 16),
        (one, 5, 1, 333, 2, 128, 16), (sixteen, 1, 2, 501, 2, 64, 16), (chunk, 1, 32, 4096, 4, 64, 16),
        (one, 5, 1, 333, 2, 128, 8),
    ):
        case = _case(Family(torch.bfloat16, d, 2 * d, "", pass_), torch.device("cpu"))
        case = _in_eight_bits(case, case)[0] if bits == 8 else case
        checked = set(binaries(case.request, case.weight, pass_ == TRAINING))
        q = empty(batch, n, 8, 2, d).permute(0, 2, 3, 1, 4)  # as projections and a cache hold them
        k = empty(batch, key_heads, s + 7, 2, d)[:, :, :s].transpose(2, 3)
        v = empty(batch, key_heads, s + 7, 2 * d)[:, :, :s]
        if bits == 8:  # of a window, that begins anywhere in memory
            k, v = packed_views(*(pack(x)[:, :, 1:] for x in (k.transpose(2, 3).flatten(-2), v)), d)
        lam = torch.tensor(0.5).expand(batch, 8, n)
        request = Request(q, k, v, lam, None, True, d**-0.5, None, None)
        others = [name for name, key in binaries(request, case.weight, pass_ == TRAINING) if (name, key) not in checked]
        print(pass_, n, s, others)
"""


def test_what_was_checked_is_what_runs() -> None:
    """The kernels of calls of other sizes, heads and strides are those that the check has compiled, bit for bit."""
    # A process that triton has not met its interpreter in.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", textwrap.dedent(KEYS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.count("\n") == done.stdout.count("[]") == 9, done.stdout + done.stderr


def test_a_full_device_says_nothing_of_the_kernels(gpu: Hopper) -> None:
    def full(request: Request, norm: Norm) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.kernels = full
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "sdpa"
    gpu.kernels = right
    assert chosen() == "triton"


def test_nothing_is_checked_while_a_graph_is_captured(gpu: Hopper) -> None:
    gpu.is_capturing = True
    assert chosen() == "sdpa"
    assert gpu.checked == []
    gpu.is_capturing = False
    assert chosen() == "triton"
    gpu.is_capturing = True
    assert chosen() == "triton"  # known by now


def test_which_devices_the_kernels_run_on(gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str | None:
        with FakeTensorMode():
            return backends.explain("cuda", torch.bfloat16)["triton"]

    for gpu.capability in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        assert reason() is None
    gpu.capability = 7, 5
    assert reason() == "it needs compute capability 8.0 or more, got 7.5"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in str(reason())
    monkeypatch.setattr(triton_backend, "triton_is_installed", lambda: False)
    assert reason() == "the package triton is not installed"


def test_the_kernels_can_be_switched_off(gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFF_TRANSFORMER_TRITON", "0")
    assert chosen() == "sdpa"
    assert gpu.checked == []
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


def test_torch_compile_keeps_the_verdict_as_a_constant(gpu: Hopper) -> None:
    """In one graph, though nothing of the check can be traced. The request is on the CPU here."""

    def answered(q: Tensor, v: Tensor) -> Tensor:
        request = Request(q, q, v, torch.ones(1, 1, 5), None, True, 1.0, None, None)
        return v + 1 if gpu_check.kernels_are_right(request) else v

    torch._dynamo.reset()
    v = torch.randn(1, 1, 5, 32)
    compiled = torch.compile(answered, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.randn(1, 1, 2, 5, 16), v), v + 1)
    assert gpu.checked == [FORWARD, *DECODING][:3]
    torch._dynamo.reset()
