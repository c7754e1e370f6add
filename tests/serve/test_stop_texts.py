"""Stop strings in texts that come in pieces."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from diff_lab.data import byte_tokenizer
from diff_transformer import pretrained
from diff_transformer.serve.api_requests import Sampling
from diff_transformer.serve.continuation import Continuation
from diff_transformer.serve.served_model import ServedModel
from diff_transformer.serve.stop_texts import UntilStop
from running_server import client_of, new_model, running

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


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_ends_a_text_alone_and_with_what_is_beside_it(batching: bool, stream: bool) -> None:
    """No text holds it, so that it would not be found there."""
    tokenizer, model = byte_tokenizer(), new_model()
    model.lm_head.weight.data[127:] = 0  # it writes ASCII, of which something is always likelier
    prompt = tokenizer("to be, or not")["input_ids"]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    new = out[len(prompt) :]
    # A token becomes special that comes for the first time, behind others.
    place = next(place for place in range(3, len(new) - 1) if new[place] not in new[:place])
    special = tokenizer.convert_ids_to_tokens(new[place])
    tokenizer.add_special_tokens({"additional_special_tokens": [special, f"{special}{special}"]})
    before, after = (tokenizer.decode([new[place + step]]) for step in (-1, 1))
    written = tokenizer.decode(new[:place], skip_special_tokens=True)
    assert written.endswith(before)
    served = ServedModel(model, tokenizer, "tiny", continuous_batching=batching)
    with running(served) as url, client_of(url) as client:
        for stop, expected in (
            (special, written),
            (["\0never\0", tokenizer.eos_token, special], written),
            (f"{special}{after}", written),
            (f"{before}{special}", written[:-1]),
            (f"{before}{special}{after}", written[:-1]),
        ):
            answer = client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=40, stop=stop, stream=stream, logprobs=0
            )
            parts: list[Any] = list(answer) if stream else [answer]
            assert "".join(part.choices[0].text for part in parts) == expected
            assert parts[-1].choices[0].finish_reason == "stop"
            tokens = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.tokens]
            assert len(tokens) == place - len(written) + len(expected)
