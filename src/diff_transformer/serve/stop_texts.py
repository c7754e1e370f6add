"""Ends a text where a stop string begins."""

from typing import Any


class SpecialMarks:
    """Lets stop strings hold special tokens, which no text does: each becomes a character that is in no text, either.

    Attributes:
        stops: the stop strings, and those of them that name special tokens once more, with their characters.
        of: the character of each of those special tokens.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        special = [(token.content, number) for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        named = [(name, number) for name, number in special if any(name in stop for stop in stops)]
        # Halves of surrogate pairs; a name that holds another one comes first.
        names = sorted(named, key=lambda name: -len(name[0]))
        self.of = {number: chr(0xD800 + place) for place, (_, number) in enumerate(names)}
        marked = list(stops)
        for name, number in names:
            marked = [stop.replace(name, self.of[number]) for stop in marked]
        self.stops = tuple(dict.fromkeys((*stops, *marked)))
        self._marks = str.maketrans("", "", "".join(self.of.values()))

    def without(self, text: str) -> str:
        """A text without these characters."""
        return text.translate(self._marks)


class UntilStop:
    """Hands on a text that comes in pieces, up to the first of some stop strings, which is left out.

    What may be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """What is certain to come before any stop string, after the next piece."""
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        sizes = ((stop, size) for stop in self._stops for size in range(1, min(len(stop), len(text) + 1)))
        held = max((size for stop, size in sizes if text.endswith(stop[:size])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What was held back, once the text has ended."""
        rest, self._held = self._held, ""
        return rest
