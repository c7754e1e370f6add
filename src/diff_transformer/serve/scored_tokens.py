"""Log-probabilities of the tokens of a text, in the form of OpenAI's completions."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from diff_transformer.token_texts import READ_BEFORE, TokenNames


class Scorer:
    """Computes log-probabilities in passes of its own, beside whatever the engine generates."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        # The same weights in modules of their own: continuous batching changes how the model attends.
        weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, weights)
        self._names = TokenNames(tokenizer)
        self._lock = threading.Lock()  # one text at a time: its logits are the largest tensor of the server

    def logprobs(
        self,
        before: list[int],
        tokens: list[int],
        offsets: list[int],
        most_likely: int,
        cache: Any = None,
        last_cached: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The field ``logprobs`` of some tokens of a text.

        Args:
            before: the text's tokens before them, but for those in the cache.
            offsets: where in the text of the answer each of the tokens begins.
            most_likely: how many of the most likely tokens are named at each place, beside the token itself.
            cache: keys and values of the text's beginning, to which those of all tokens here but the last are added.
            last_cached: the last tokens in the cache, by which others are named.
        """
        read = [*before, *tokens][:-1]
        with self._lock:
            expected = self.log_probabilities(read, cache, last=len(tokens)) if tokens and read else torch.empty(0, 0)
            return self._named([*last_cached, *before], tokens, expected, offsets, most_likely)

    def most_likely_next(self, tokens: list[int], offsets: list[int], most_likely: int) -> tuple[int, dict[str, Any]]:
        """The most likely token after some, and the field ``logprobs`` of the last of these and itself, in one pass."""
        with self._lock:
            expected = self.log_probabilities(tokens, last=len(offsets))
            new = int(expected[-1].argmax())
            first = len(tokens) + 1 - len(offsets)
            return new, self._named(tokens[:first], [*tokens[first:], new], expected, offsets, most_likely)

    def growing_text(self, most_likely: int) -> "GrowingText":
        """A text whose tokens come in parts."""
        return GrowingText(self, DynamicCache(config=self._model.config), most_likely)

    @torch.inference_mode()
    def log_probabilities(self, tokens: list[int], cache: Any = None, *, last: int = 0) -> Tensor:
        """What the model expects after each of N tokens, or after the `last` of them alone: (N or `last`, vocabulary),
        in float32 or the model's wider dtype.
        """
        ids = torch.tensor([tokens], device=self._model.device)
        out = self._model(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=last)
        logits = out.logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def _named(
        self, before: list[int], tokens: list[int], expected: Tensor, offsets: list[int], most_likely: int
    ) -> dict[str, Any]:
        """Tokens with what was expected in their places; nothing was in the place of a text's first token."""
        text = [*before, *tokens]
        names = self._names.of(text, len(before))
        token_logprobs: list[float | None] = [None] * (len(tokens) - len(expected))
        top_logprobs: list[dict[str, float] | None] = [None] * len(token_logprobs)
        for place, row in enumerate(expected, len(token_logprobs)):
            own = float(row[tokens[place]])
            # Several tokens can have the same name; the likeliest of them is named.
            likeliest = row.topk(min(most_likely, len(row))).indices.tolist()
            end = len(before) + place
            known = text[max(0, end - READ_BEFORE) : end]
            named = {self._names.after(known, other): float(row[other]) for other in reversed(likeliest)}
            token_logprobs.append(own)
            top_logprobs.append({names[place]: own} | named)
        return {
            "tokens": names,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


class GrowingText:
    """A text whose tokens come in parts; the model reads each token once."""

    def __init__(self, scorer: Scorer, cache: Any, most_likely: int) -> None:
        self._scorer, self._cache, self._most_likely = scorer, cache, most_likely
        self._last_read: list[int] = []
        self._unread: list[int] = []

    def add(self, tokens: list[int]) -> None:
        """Tokens whose log-probabilities nobody asks for."""
        self._unread += tokens

    def logprobs(self, tokens: list[int], offsets: list[int]) -> dict[str, Any]:
        """The field ``logprobs`` of the next tokens, whose places in the text of the answer are `offsets`."""
        named = self._scorer.logprobs(self._unread, tokens, offsets, self._most_likely, self._cache, self._last_read)
        if tokens:
            self._last_read = [*self._last_read, *self._unread, *tokens[:-1]][-READ_BEFORE:]
            self._unread = tokens[-1:]
        return named
