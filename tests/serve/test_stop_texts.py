"""Stop strings in texts that come in pieces."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diff_lab.data import byte_tokenizer
from diff_transformer.serve.completion import ServedModel, until_stop
from running_server import client_of, new_model, new_served, running

LETTERS = st.text(alphabet="ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_where_the_first_stop_string_begins(pieces: list[str], stops: list[str]) -> None:
    text = held = seen = ""
    for piece in pieces:
        seen += piece
        certain, held, is_stopped = until_stop(held + piece, stops)
        text += certain
        # Nothing is handed on that could still belong to a stop string, and nothing else is held back.
        whole = [seen.find(stop) for stop in stops if stop in seen]
        assert is_stopped == bool(whole)
        if is_stopped:
            assert text == seen[: min(whole)]
            return
        assert text + held == seen
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_of_any_length() -> None:
    """Its beginnings are not all written out: of a million letters they would take half a terabyte."""
    assert until_stop("ba", ["a" * 1_000_000]) == ("b", "a", False)


def test_the_beginning_of_a_stop_string_is_shown_where_the_text_ends(alone: Any) -> None:
    whole = alone("to be", 20)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "to be", "max_tokens": 20, "temperature": 0}
    with running(new_served()) as url, client_of(url) as client:
        answer = client.completions.create(**asked, stop=whole[-3:] + "\0never").choices[0]
        assert (answer.text, answer.finish_reason) == (whole, "length")
        events = client.completions.create(**asked, stop=whole[-3:] + "\0never", stream=True)
        assert "".join(event.choices[0].text for event in events) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_ends_a_text(stream: bool) -> None:
    """No text holds it, so that it would not be found there."""
    tokenizer, model = byte_tokenizer(), new_model()
    model.lm_head.weight.data[127:] = 0  # it writes ASCII, of which something is always likelier
    prompt = tokenizer("to be, or not")["input_ids"]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist()
    new = out[len(prompt) :]
    # A token becomes special that comes for the first time, behind others.
    place = next(place for place in range(3, len(new) - 1) if new[place] not in new[:place])
    special = tokenizer.convert_ids_to_tokens(new[place])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    with running(ServedModel(model, tokenizer, "tiny")) as url, client_of(url) as client:
        answer = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=40, stop=["\0never\0", special], stream=stream
        )
        parts: list[Any] = list(answer) if stream else [answer]
        expected = tokenizer.decode(new[:place], skip_special_tokens=True)
        assert "".join(part.choices[0].text for part in parts) == expected
        assert parts[-1].choices[0].finish_reason == "stop"
