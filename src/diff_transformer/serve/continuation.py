"""The text that follows one prompt: whole or in parts, up to a stop string, with log-probabilities if asked for."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from diff_transformer.brief_threads import in_brief_thread
from diff_transformer.serve.api_requests import Sampling
from diff_transformer.serve.served_model import ServedModel
from diff_transformer.serve.stop_texts import SpecialMarks, UntilStop
from diff_transformer.token_texts import NewToken, TokenTexts

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A part of an answer's text, and what the field ``logprobs`` of OpenAI's completions says of it."""

    text: str
    logprobs: dict[str, Any] | None


class Continuation:
    """What a model writes after one prompt.

    Args:
        tokens: the prompt's.
        sampling: made by `ServedModel.fitted`.
        stop: the text ends before the first of these, which may name special tokens.
        echo: the prompt's text, where the answer begins with it.
        logprobs: how many of the most likely tokens are named at each place; None for no log-probabilities.
        goes_on: whether the text goes on from the prompt's, perhaps with a space. An answer in a chat begins anew.
    """

    def __init__(
        self,
        served: ServedModel,
        tokens: list[int],
        sampling: Sampling,
        *,
        stop: tuple[str, ...] = (),
        echo: str | None = None,
        logprobs: int | None = None,
        goes_on: bool = True,
    ) -> None:
        self._served, self._tokens, self._sampling, self._stop = served, tokens, sampling, stop
        self._echo, self._logprobs = echo or "", logprobs
        texts = TokenTexts(served.tokenizer)
        self._echoed = [] if echo is None else [texts.read(token) for token in tokens]
        self._not_shown = tokens if echo is None else []
        self._before = tokens if goes_on else []
        self.new_tokens = 0
        """How many tokens were generated, those of a stop string too, once the text has ended."""
        self.reason = "length"
        """Why the text has ended, in OpenAI's words."""

    async def parts(self) -> AsyncGenerator[Part, None]:
        """The text as it comes; its log-probabilities are computed beside it, for each part with those before it.

        Raises:
            GenerationError: generating failed.
            ServerStoppingError: the server stops.
        """
        scored = None if self._logprobs is None else self._served.scorer.growing_text(self._logprobs)

        async def part(text: str, tokens: Sequence[NewToken]) -> Part:
            if scored is None:
                return Part(text, None)
            return Part(text, await _apart(scored.logprobs, *_numbers_and_offsets(tokens)))

        if scored is not None:
            scored.add(self._not_shown)
        if self._echoed:
            yield await part(self._echo, self._echoed)
        async with aclosing(self._generated()) as generated:
            async for text, tokens in generated:
                if text or scored is not None:
                    yield await part(text, tokens)

    async def whole(self) -> Part:
        """All of the text, whose log-probabilities are computed in one pass. Raises what `parts` raises."""
        scorer, sampling = self._served.scorer, self._sampling
        if self._logprobs is not None and sampling.max_tokens == 1 and sampling.greedy and not self._stop:
            # One greedy token, for which programs that score texts ask, comes from the same pass.
            return await _apart(self._with_next_token, self._logprobs)
        async with aclosing(self._generated()) as generated:
            pieces = [piece async for piece in generated]
        text = self._echo + "".join(text for text, _ in pieces)
        if self._logprobs is None:
            return Part(text, None)
        shown = _numbers_and_offsets([*self._echoed, *(token for _, tokens in pieces for token in tokens)])
        return Part(text, await _apart(scorer.logprobs, self._not_shown, *shown, self._logprobs))

    def _with_next_token(self, logprobs: int) -> Part:
        offsets = [*_numbers_and_offsets(self._echoed)[1], len(self._echo)]
        token, named = self._served.scorer.most_likely_next(self._tokens, offsets, logprobs)
        self._count(token)
        texts = TokenTexts(self._served.tokenizer, before=self._before)
        return Part(self._echo + texts.read(token).text + texts.rest(), named)

    async def _generated(self) -> AsyncGenerator[tuple[str, list[NewToken]], None]:
        """The new text in pieces, each with the tokens that begin in it; afterwards it is known why the text ends.

        The tokens of a stop string are in no piece, but for one that begins before it.
        """
        if self._sampling.max_tokens == 0:
            return
        generation = self._served.generation(self._tokens, self._sampling)
        texts = TokenTexts(self._served.tokenizer, offset=len(self._echo), before=self._before)
        marks = SpecialMarks(self._served.tokenizer, self._stop)
        until = UntilStop(marks.stops)
        shown = len(self._echo)
        waiting: list[NewToken] = []
        async with aclosing(generation.tokens()) as tokens:
            async for token in tokens:
                self._count(token)
                waiting.append(texts.read(token))
                new = waiting[-1].text
                if token in marks.of:
                    new += texts.rest() + marks.of[token]
                if text := marks.without(until.feed(new)):
                    shown += len(text)
                    begun = [token for token in waiting if token.offset < shown]
                    waiting = waiting[len(begun) :]
                    yield text, begun
                if until.stopped:
                    self.reason = "stop"
                    return
        rest = marks.without(until.feed(texts.rest()) + until.rest())
        if rest or waiting:
            yield rest, waiting
        if until.stopped or self.new_tokens < (self._sampling.max_tokens or 0):
            self.reason = "stop"

    def _count(self, token: int) -> None:
        self.new_tokens += 1
        if self._served.engine.ends_text(token):
            self.reason = "stop"


async def _apart(work: Callable[..., T], *arguments: Any) -> T:
    """Compute beside the thread that generates, which is as fast as before once this is done."""
    return await asyncio.to_thread(in_brief_thread, partial(work, *arguments))


def _numbers_and_offsets(tokens: Sequence[NewToken]) -> tuple[list[int], list[int]]:
    return [token.token for token in tokens], [token.offset for token in tokens]
