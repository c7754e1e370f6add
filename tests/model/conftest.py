"""Tiny models whose attention is peaked, and how far apart two answers of theirs may be.

At the usual initial weights attention is nearly uniform and most mistakes pass; here logits have a standard deviation
of about 4, and λ and the norm weights are far from where they start. Most tests run in float64, where two ways to
compute the same thing agree to a dozen digits and a mistake stands out.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AttentionInterface

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model.interface_attention import eager_attention_forward
from diff_transformer.ops import backends
from diff_transformer.ops.attention_request import Request
from tiny_model import FORMS, SIZES, TokenLambda, check_rounding, kinds, sharpen, sizes_for

transformers.utils.logging.disable_progress_bar()

VOCABULARY = SIZES["vocab_size"]


kind = kinds(FORMS)


@pytest.fixture(scope="session")
def make() -> Callable[..., DiffTransformerForCausalLM]:
    """(kind, dtype=float64, sharp=True, **config) → a model in evaluation mode, the same weights every time."""

    def make(
        kind: str = "diff", dtype: torch.dtype = torch.float64, sharp: bool = True, **config: Any
    ) -> DiffTransformerForCausalLM:
        # λ of the two layers becomes 0.52 and 1.26; of "diff_grouped", whose W_O is larger, 1.19 and 0.41. With a λ of
        # each token it lies between 0 and 1, and the seed is one of those that half precision is not hard on.
        of_tokens = isinstance(kind, TokenLambda) or ATTENTION_TYPES[kind].latent
        torch.manual_seed(45 if of_tokens else 44 if ATTENTION_TYPES[kind].grouped else 41)
        model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes_for(kind, **config)))
        if sharp:
            sharpen(model)
        return model.to(dtype).eval()

    return make


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """(batch=2, length=9) → random tokens, 0 left out (it is the padding of these tests)."""
    return lambda batch=2, length=9: torch.randint(1, VOCABULARY, (batch, length))


@pytest.fixture
def check() -> Callable[..., None]:
    return check_rounding


@pytest.fixture
def forget_the_device() -> Iterator[None]:
    """accelerate keeps what the Trainer set up for the whole process; the next test may want another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


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
