"""The fixtures of the models' tests: which attention types they take, and what runs while a model answers."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from diff_transformer.model.interface_attention import eager_attention_forward
from diff_transformer.ops import backends
from diff_transformer.ops.attention_request import Request
from tiny_model import FORMS, kinds

transformers.utils.logging.disable_progress_bar()

kind = kinds(FORMS)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What our backends are asked for."""
    seen: list[Request] = []

    def noted(attend: Callable[..., Tensor], request: Request, *args: Any) -> Tensor:
        seen.append(request)
        return attend(request, *args)

    for name, backend in list(backends._BACKENDS.items()):
        monkeypatch.setitem(backends._BACKENDS, name, backend._replace(attend=partial(noted, backend.attend)))
    return seen


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each implementation ran: our backends by name, transformers' "eager", torch's own attention."""
    counter: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counter[name] += 1
        return function(*args, **kwargs)

    for name, backend in list(backends._BACKENDS.items()):
        attend = partial(counted, name, backend.attend)
        monkeypatch.setitem(backends._BACKENDS, name, backend._replace(attend=attend))
    functional = torch.nn.functional
    torchs = partial(counted, "torch", functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", torchs)
    eager = partial(counted, "eager", eager_attention_forward)
    monkeypatch.setitem(AttentionInterface._global_mapping, "eager", eager)
    return counter
