"""Stop strings in texts that come in pieces."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from diff_transformer import pretrained
from diff_transformer.serve.api_requests import Sampling
from diff_transformer.serve.continuation import Continuation
from diff_transformer.serve.stop_texts import UntilStop

LETTERS = st.text(alphabet="ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_where_the_first_stop_string_begins(pieces: list[str], stops: list[str]) -> None:
    until = UntilStop(tuple(stops))
    text = ""
    seen = ""
    for piece in pieces:
        seen += piece
        text += until.feed(piece)
        # Nothing is handed on that could still belong to a stop string, and nothing else is held back.
        whole = [seen.find(stop) for stop in stops if stop in seen]
        if whole:
            assert until.stopped
            assert text == seen[: min(whole)]
            return
        assert seen.startswith(text)
        assert all(any(stop.startswith(seen[len(text) :]) for stop in stops) for _ in seen[len(text) :])
    assert not until.stopped
    assert text + until.rest() == seen


def test_a_stop_string_of_any_length() -> None:
    """Its beginnings are not all written out: of a million letters they would take half a terabyte."""
    until = UntilStop(("a" * 1_000_000,))
    assert (until.feed("ba"), until.rest()) == ("b", "a")


@pytest.mark.parametrize("max_tokens", [2, 3])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(("stop", "expected"), [("seQ", "the house"), ("e hoQ", "the house"), ("se", "the hou")])
def test_the_last_token_is_shown_whole_unless_a_stop_string_is_complete(
    stop: str, expected: str, in_parts: bool, max_tokens: int
) -> None:
    """Its end may be the beginning of one, of which no more comes. Fewer tokens than may come are a "stop", too."""
    tokenizer: Any = AutoTokenizer.from_pretrained(pretrained("novels-diff"))
    ids = tokenizer.convert_tokens_to_ids(["the", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}house"])
    assert tokenizer.decode(ids) == "the house"

    async def tokens() -> AsyncGenerator[int, None]:
        for token in ids:
            yield token

    engine = SimpleNamespace(ends_text=lambda token: False)
    served: Any = SimpleNamespace(
        tokenizer=tokenizer,
        engine=engine,
        scorer=None,
        generation=lambda *_: SimpleNamespace(tokens=tokens),
    )
    continuation = Continuation(served, [0], Sampling(max_tokens=max_tokens), stop=(stop,))

    async def text() -> str:
        if in_parts:
            return "".join([part.text async for part in continuation.parts()])
        return (await continuation.whole()).text

    assert asyncio.run(text()) == expected
    assert continuation.reason == ("stop" if expected == "the hou" or max_tokens == 3 else "length")
