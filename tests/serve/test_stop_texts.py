"""Stop strings in texts that come in pieces."""

from hypothesis import given
from hypothesis import strategies as st

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
