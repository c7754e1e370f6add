"""Log-probabilities of the tokens of a text, in the form of OpenAI's completions."""

import copy
import threading
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


class Scorer:
    """Computes log-probabilities in one forward pass for each text, beside whatever the engine generates."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        # The same weights in modules of their own: continuous batching changes how the model attends.
        weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, weights)
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def completion(
        self, tokens: list[int], new: list[int] | None, first: int, most_likely: int
    ) -> tuple[list[int], dict[str, Any]]:
        """The new tokens of a completion and its field ``logprobs``.

        Args:
            tokens: the prompt's.
            new: those after it; None for the one that is the most likely, which costs no pass of its own.
            first, most_likely: as in `completion_logprobs`.
        """
        with self._lock:  # one text at a time: its logits are the largest tensor of the server
            expected = self.log_probabilities(tokens if new is None else (tokens + new)[:-1] or tokens)
            if new is None:
                new = [int(expected[-1].argmax())]
            return new, completion_logprobs(tokens + new, expected, first, most_likely, self._tokenizer)

    @torch.inference_mode()
    def log_probabilities(self, tokens: list[int]) -> Tensor:
        """What the model expects after each of N tokens: (N, vocabulary), in float32 or the model's wider dtype."""
        ids = torch.tensor([tokens], device=self._model.device)
        logits = self._model(ids, use_cache=False).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def completion_logprobs(
    tokens: list[int], expected: Tensor, first: int, most_likely: int, tokenizer: Any
) -> dict[str, Any]:
    """The field ``logprobs`` of a completion.

    Args:
        tokens: all tokens, the prompt's too.
        expected: what `Scorer.log_probabilities` says of all of them but perhaps the last.
        first: the place of the first token that the completion shows.
        most_likely: how many of the most likely tokens are named at each place, beside the token itself.
    """
    texts = [tokenizer.decode([token]) for token in tokens]
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for place in range(first, len(tokens)):
        if place == 0:  # nothing comes before the first token
            token_logprobs.append(None)
            top_logprobs.append(None)
            continue
        row = expected[place - 1]
        own = float(row[tokens[place]])
        # Several tokens can have the same text; the likeliest of them is named.
        likeliest = row.topk(min(most_likely, len(row))).indices.tolist()
        named = {tokenizer.decode([token]): float(row[token]) for token in reversed(likeliest)}
        token_logprobs.append(own)
        top_logprobs.append({texts[place]: own} | named)
    ends = list(accumulate(map(len, texts[first:])))
    return {
        "tokens": texts[first:],
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": [0, *ends][: len(ends)],
    }
