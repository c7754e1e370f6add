"""Ends a text where a stop string begins."""


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
