"""Generated text on stdout, word by word."""

import sys

from transformers import TextStreamer


class StdoutStreamer(TextStreamer):
    """Writes generated text to stdout; in a terminal, control characters, which a byte model may write, show as "�"."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if sys.stdout.isatty():
            text = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
        sys.stdout.write(text + ("\n" if stream_end else ""))
        sys.stdout.flush()
