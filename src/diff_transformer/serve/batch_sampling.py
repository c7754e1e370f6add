"""How each request of a batch chooses its tokens: by its own temperature, top_p and seed.

transformers' continuous batching draws one token of each row of scores. The three steps here go before it, in their
order; the last one draws, and leaves nothing to choose.
"""

import random
import secrets
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

from diff_transformer.serve.api_requests import LOWEST_TEMPERATURE

DRAWN_BITS = 31  # of a random number, which travels in the int32 that transformers has for each request and step


def sampling_steps() -> Any:
    """transformers' list of processors, for a manager of continuous batching that has not been started."""
    steps = [
        _Temperature(TemperatureLogitsWarper(1.0)),
        _TopP(TopPLogitsWarper(1.0)),
        Draw(),
    ]
    processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList(steps))
    processors.tensors_required = len(steps)  # it counts those alone that it converts itself
    return processors


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    """Divides logits by each request's temperature; below the lowest, the first of the most likely tokens is left."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        temperatures = tensor_arg[: len(scores)].view(torch.float32).unsqueeze(-1)
        most_likely = _alone(scores, scores.argmax(-1, keepdim=True))
        return torch.where(temperatures < LOWEST_TEMPERATURE, most_likely, scores / temperatures)


class _TopP(ContinuousBatchingTopPLogitsWarper):
    """Leaves each request's most likely tokens, which together have the probability top_p."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        # Sorting a large vocabulary takes long on a CPU. On a GPU looking first would wait for it.
        if scores.device.type == "cpu" and bool((tensor_arg[: len(scores)].view(torch.float32) == 1).all()):
            return scores
        return super().__call__(scores, tensor_arg)


class Draw(ContinuousBatchingLogitsProcessor):
    """Leaves one token of each row, drawn with the probabilities of the scores.

    The random number of a request with a seed depends on the seed and on the token's place alone: not on other
    requests, nor on when the request came.
    """

    supported_kwargs = {"seed": int}  # noqa: RUF012  # as the class of transformers has it
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Numbers for rows that belong to no request."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """A random number below 2³¹ for each request."""
        states = [request.state for request in requests_with_new_token]
        # Tokens that are read or generated already: also after the request had to leave the cache for a while.
        numbers = [_number(state.logit_processor_kwargs.get("seed"), state.position_offset) for state in states]
        return torch.tensor(numbers, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores (rows, vocabulary) to such of which one in each row is finite."""
        cumulative = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        drawn = tensor_arg[: len(scores), None].to(torch.float64) * 2.0**-DRAWN_BITS * cumulative[:, -1:]
        # A row of NaN has no such token, and must not end the batch of all others.
        return _alone(scores, torch.searchsorted(cumulative, drawn, right=True).clamp(max=scores.shape[-1] - 1))


def _number(seed: int | None, place: int) -> int:
    return secrets.randbits(DRAWN_BITS) if seed is None else random.Random(f"{seed} {place}").getrandbits(DRAWN_BITS)


def _alone(scores: Tensor, tokens: Tensor) -> Tensor:
    """Scores that leave one token of each row."""
    return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)
