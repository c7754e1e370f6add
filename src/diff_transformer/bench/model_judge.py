"""What a pass of a whole model computes, and whether it is right."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from diff_transformer.bench.model_settings import ModelSettings

# What roundings alone may add to the plain model's error, relative to the quantity: a few to the dtype, and those of a
# sum over the sequence in float32, which add up as the root of its length.
ROUNDINGS, ACCUMULATOR_EPS = 8, torch.finfo(torch.float32).eps


def tokens_of(settings: ModelSettings, pass_: str, length: int) -> Tensor:
    """The tokens of a pass; when decoding those of the cache, and one more."""
    generator = torch.Generator().manual_seed(0)
    size = (settings.batch_of(pass_, length), length + (pass_ == "decode"))
    return torch.randint(settings.vocabulary, size, generator=generator).to(settings.device)


def filled_cache(model: Any, tokens: Tensor) -> DynamicCache:
    """A cache that holds the tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _answer(model: Any, pass_: str, tokens: Tensor, *, cached: bool) -> list[Tensor]:
    """What a pass computes: the logits, for a training step also the gradient of all weights as one vector."""
    if pass_ == "decode":
        with torch.no_grad():
            if not cached:
                return [model(tokens, use_cache=False, logits_to_keep=1).logits]
            cache = filled_cache(model, tokens[:, :-1])
            return [model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits]
    if pass_ == "forward":
        with torch.no_grad():
            return [model(tokens, use_cache=False).logits]
    outputs = model(tokens, labels=tokens, use_cache=False)
    gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
    return [outputs.logits.detach(), torch.cat([gradient.double().flatten() for gradient in gradients])]


class Judge:
    """The truth of one model in one pass: the same weights in float64 with the plain formula for attention."""

    def __init__(self, model: Any, plain: str, pass_: str, length: int, settings: ModelSettings) -> None:
        self._pass, self._length = pass_, length
        self._tokens = tokens_of(settings, pass_, length)
        self._plain = copy.deepcopy(model)
        self._plain.set_attn_implementation(plain)
        double = copy.deepcopy(self._plain).double()
        self._truth = [value.double() for value in _answer(double, pass_, self._tokens, cached=False)]

    def error(self, model: nn.Module, dtype: torch.dtype) -> float:
        """The error of `model` as a share of what is allowed: twice the plain formula's in `dtype`, and a band."""
        plain = copy.deepcopy(self._plain).to(dtype)
        yardstick = _answer(plain, self._pass, self._tokens, cached=False)
        found = _answer(model, self._pass, self._tokens, cached=True)
        shares = []
        for value, other, truth in zip(found, yardstick, self._truth, strict=True):
            band = (ROUNDINGS * torch.finfo(dtype).eps + self._length**0.5 * ACCUMULATOR_EPS) / 2 * _rms(truth)
            share = _rms(value.double() - truth) / (2 * _rms(other.double() - truth) + band)
            shares.append(share if share == share else float("inf"))
        return max(shares)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
