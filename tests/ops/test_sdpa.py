"""The sdpa backend picks the variant of Appendix A that keeps torch on a fused kernel."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from budget import Case, build, prepared
from diff_transformer import diff_attention
from diff_transformer.ops import sdpa
from full_run import short_run


class Calls(TorchFunctionMode):
    """Notes of each call to torch's attention (d, dv), and which kernels may run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[tuple[int, int]] = []
        self.orders: list[list[int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.widths.append((args[1].shape[-1], args[2].shape[-1]))
            self.orders.append(order())
        return func(*args, **(kwargs or {}))


def calls(case: Case) -> Calls:
    """Those of one request."""
    problem, expected = prepared(case)
    with Calls() as seen:
        expected.check(problem.solve(diff_attention, backend="sdpa"))
    return seen


def use_plan(monkeypatch: pytest.MonkeyPatch, plan: Callable[[sdpa.SdpaCase], sdpa.SdpaPlan]) -> None:
    planned = torch.compiler.assume_constant_result(lambda *fields: plan(sdpa.SdpaCase(*fields)))
    monkeypatch.setattr(sdpa, "sdpa_plan", planned)


@pytest.mark.parametrize("takes_other_widths", [True, False])
@pytest.mark.parametrize(("dv", "widths"), [(4, [4]), (8, [4, 4]), (12, [4] * 3), (10, [4] * 3), (3, [4]), (1, [4])])
def test_values_are_split_into_widths_of_d_for_a_kernel_that_takes_no_other(
    monkeypatch: pytest.MonkeyPatch, dv: int, widths: list[int], takes_other_widths: bool
) -> None:
    use_plan(monkeypatch, lambda case: sdpa.SdpaPlan(takes_other_widths, repeat_keys=case.heads > 1))
    widths = [dv] if takes_other_widths else widths
    assert calls(Case(d=4, dv=dv, is_causal=True)).widths == 2 * [(4, width) for width in widths]


@pytest.mark.parametrize("mask", [None, "bool (B, 1, 1, S)", "add -inf (B, 1, N, S)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_variant_chosen_here_runs_fused(dtype: torch.dtype, mask: str | None, key_heads: int) -> None:
    """On the CPU the fused kernel wants dv = d; answering with torch's plain formula would be the wrong choice."""
    problem = build(Case(heads=4, key_heads=key_heads, d=8, dv=16, is_causal=True, mask=mask, dtype=dtype))
    with torch.profiler.profile() as profile:
        diff_attention(problem.q, problem.k, problem.v, problem.lam, **problem.options, backend="sdpa")
    names = Counter(event.name for event in profile.events())
    assert names["aten::_scaled_dot_product_flash_attention_for_cpu"] == 4
    assert names["aten::_scaled_dot_product_attention_math"] == 0


def test_rows_of_queries_that_overlap_are_copied_for_torch() -> None:
    q, k, v = (
        torch.randn(1, 2, 2, 104).unfold(-1, 64, 1)[..., :40, :],
        torch.randn(1, 2, 2, 9, 64),
        torch.randn(1, 2, 9, 64),
    )
    torch.testing.assert_close(*(diff_attention(x, k, v, 0.5, backend="sdpa") for x in (q, q.contiguous())))


# On CUDA: which of torch's kernels is asked for. There need not be such a device: torch's questions are answered here.

Takes = dict[str, Any]
FLASH: Takes = {"d = dv": True, "wide": False, "mask": False, "grouped": True}  # as of torch 2.13
CUDNN: Takes = {"d = dv": True, "wide": True, "mask": True, "grouped": True}
EFFICIENT: Takes = {"d = dv": True, "wide": True, "mask": True, "grouped": False}
NOTHING: Takes = {"d = dv": False, "wide": False, "mask": False, "grouped": False}
NO_KERNEL = dict.fromkeys(("flash", "cudnn", "efficient"), NOTHING)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What each kernel takes, to be changed by a test, and which cuDNN there is."""
    there: dict[str, Any] = {"flash": FLASH, "cudnn": CUDNN, "efficient": EFFICIENT, "version": 91900}

    def params(*arguments: Any) -> SimpleNamespace:
        names = ("q", "k", "v", "mask", "dropout", "causal", "grouped")
        return SimpleNamespace(**dict(zip(names, arguments, strict=True)))

    def answer(kernel: str, params: SimpleNamespace) -> bool:
        takes = there[kernel]
        return (
            takes["d = dv" if params.k.shape[-1] == params.v.shape[-1] else "wide"]
            and (params.mask is None or takes["mask"])
            and (not params.grouped or takes["grouped"])
            and (not params.q.requires_grad or takes.get("gradient", True))
        )

    probe = sdpa._probe
    for place, name, value in (
        (sdpa, "_probe", lambda case: probe(case._replace(device="cpu"))),
        (torch.backends.cuda, "SDPAParams", params),
        *((torch.backends.cuda, f"can_use_{kernel}_attention", partial(answer, kernel)) for kernel in NO_KERNEL),
        (torch.backends.cudnn, "version", lambda: there["version"]),
    ):
        monkeypatch.setattr(place, name, value)
    sdpa._plan_on_cuda.cache_clear()
    yield there
    sdpa._plan_on_cuda.cache_clear()


def way(dv: int = 128, masked: bool = False, **more: Any) -> sdpa.SdpaPlan:
    sdpa._plan_on_cuda.cache_clear()
    return sdpa.sdpa_plan(*sdpa.SdpaCase("cuda", torch.bfloat16, 64, dv, masked, **more))


CUDNN_FIRST, SPLIT, WHOLE = sdpa.SdpaPlan(True, cudnn=True), sdpa.SdpaPlan(False), sdpa.SdpaPlan(True)
# What is there, if not all that is above, and what is asked for → cuDNN, then flash on split values, then the others.
PLANS: list[tuple[dict[str, Any], dict[str, Any], sdpa.SdpaPlan]] = [
    ({}, {}, CUDNN_FIRST),
    ({}, {"masked": True}, CUDNN_FIRST),
    ({}, {"queries": 1}, SPLIT),  # cuDNN plans anew for every length
    ({"version": 91500}, {}, SPLIT),  # torch knows it to be wrong for some lengths
    ({"version": None}, {}, SPLIT),
    ({"version": None}, {"masked": True}, WHOLE),  # of the memory-efficient kernel
    ({"version": None, "flash": {**FLASH, "wide": True}}, {}, WHOLE),
    ({"cudnn": {**CUDNN, "gradient": False}}, {}, CUDNN_FIRST),
    ({"cudnn": {**CUDNN, "gradient": False}}, {"gradient": True}, SPLIT),
    ({}, {"dv": 64}, WHOLE),
    (NO_KERNEL, {"dv": 64}, WHOLE),
    (NO_KERNEL, {}, WHOLE),  # the plain formula, twice instead of four times
    ({}, {"heads": 2}, CUDNN_FIRST),
    ({"cudnn": NOTHING}, {"heads": 2}, SPLIT),
    ({"cudnn": NOTHING}, {"heads": 2, "masked": True}, sdpa.SdpaPlan(True, repeat_keys=True)),
    ({"cudnn": NOTHING, "efficient": NOTHING}, {"heads": 2, "masked": True}, sdpa.SdpaPlan(True, repeat_keys=True)),
]


def test_which_kernel_is_asked_for(kernels: dict[str, Any]) -> None:
    all_there = dict(kernels)
    for there, request, plan in PLANS:
        kernels.update({**all_there, **there})
        assert way(**request) == plan, (there, request)


def test_switching_a_kernel_off_is_noticed(kernels: dict[str, Any]) -> None:
    case = sdpa.SdpaCase("cuda", torch.bfloat16, 64, 128, False)
    assert sdpa.sdpa_plan(*case).cudnn
    kernels["cudnn"] = NOTHING
    assert sdpa.sdpa_plan(*case).cudnn  # kept
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert sdpa.sdpa_plan(*case) == sdpa.SdpaPlan(False)


def order() -> list[int]:
    """Which kernels may run, and in which order."""
    return [int(backend) for backend in torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)]


def test_cudnn_first_is_for_these_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plan(monkeypatch, lambda case: sdpa.SdpaPlan(True, cudnn=True))
    before = order()
    kernels = torch.nn.attention.SDPBackend
    first = [kernels.CUDNN_ATTENTION.value, kernels.EFFICIENT_ATTENTION.value, kernels.MATH.value]
    assert calls(Case(is_causal=True, dv=8)).orders == 2 * [first]
    assert order() == before


@pytest.mark.all
@pytest.mark.parametrize("cudnn", short_run([True, False], [True]))
def test_each_way_compiles_in_one_graph(monkeypatch: pytest.MonkeyPatch, cudnn: bool) -> None:
    torch._dynamo.reset()
    use_plan(monkeypatch, lambda case: sdpa.SdpaPlan(True, cudnn=cudnn, repeat_keys=True))
    before = order()
    for length in (9, 12, 17):
        problem, expected = prepared(replace(Case(heads=4, is_causal=True), queries=length, keys=length))
        compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
        expected.check(problem.solve(compiled, backend="sdpa"))
    assert order() == before


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, "bool (B, 1, 1, S)", "add -inf (B, 1, N, S)"])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("queries", [150, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_way_on_cuda_is_the_plain_formula(
    dtype: torch.dtype, queries: int, key_heads: int, mask: str | None
) -> None:
    case = Case(heads=4, key_heads=key_heads, d=64, dv=128, queries=queries, keys=150, gain=1.0, mask=mask, dtype=dtype)
    problem, expected = prepared(replace(case, is_causal=queries == 150))
    there = problem.to("cuda")
    with torch.profiler.profile() as profile:
        answer = there.solve(diff_attention, backend="sdpa")
    expected.check({name: value.cpu() for name, value in answer.items()})
    assert not any(event.name == "aten::_scaled_dot_product_attention_math" for event in profile.events())
