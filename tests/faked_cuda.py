"""A CUDA device made up: what torch says of it, and requests whose tensors say that they are on it."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.triton import gpu_check


def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Hopper whose checks run on the CPU, at small sizes, and of which nothing is known yet."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Faked")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compare = gpu_check._compare
    monkeypatch.setattr(gpu_check, "_compare", lambda family, _: compare(family, torch.device("cpu")))
    monkeypatch.setattr(gpu_check, "LENGTH", 40)
    monkeypatch.setattr(gpu_check, "LONG_CACHE", 64)
    monkeypatch.setattr(gpu_check, "_reasons", {})
    monkeypatch.delenv(gpu_check.SWITCH, raising=False)


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
