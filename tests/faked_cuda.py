"""A CUDA device made up: what torch says of it, and requests whose tensors say that they are on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops import device_findings, kernel_check
from diff_transformer.ops.attention_request import Request


def fake_device(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: tuple[int, int] = (9, 0)) -> None:
    """One Hopper whose checks run on the CPU, and whose findings go into a folder."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Faked")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    outcome = kernel_check.outcome
    monkeypatch.setattr(kernel_check, "outcome", lambda kernels, _: outcome(kernels, torch.device("cpu")))
    monkeypatch.setattr(kernel_check, "LENGTH", 40)
    monkeypatch.setattr(kernel_check, "LONG_CACHE", 64)
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(folder))
    for switch in ("DIFF_TRANSFORMER_TRITON", "DIFF_TRANSFORMER_TUNE"):
        monkeypatch.delenv(switch, raising=False)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has in memory, as if another one began."""
    device_findings.findings_of.cache_clear()
    monkeypatch.setattr(kernel_check, "_warned", set())


def request_on_cuda(
    n: int = 40,
    s: int | None = None,
    *,
    d: int = 16,
    dtype: torch.dtype = torch.float16,
    gradient: bool = False,
    ratio: int = 1,
    **more: Any,
) -> Request:
    """Tensors without numbers, on the device."""
    s = n if s is None else s
    with FakeTensorMode():
        q = torch.empty(1, 2 // ratio, ratio + 1, n, d, dtype=dtype, device="cuda", requires_grad=gradient)
        k, v = (torch.empty(*size, dtype=dtype, device="cuda") for size in ((1, 1, 2, s, d), (1, 1, s, 2 * d)))
        lam = torch.empty(1, 2, n, device="cuda")
    settings = {"attn_mask": None, "is_causal": True, "scale": 1.0, "window": None, "segment_bounds": None, **more}
    return Request(q, k, v, lam, **settings)
