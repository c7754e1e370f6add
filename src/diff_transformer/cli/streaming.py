"""Text that appears while it is written."""

import sys

from transformers import TextStreamer


class Writer(TextStreamer):
    """Writes to stdout. A model of bytes may write any control character: in a terminal these show as "�"."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if sys.stdout.isatty():
            text = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
        sys.stdout.write(text + ("\n" if stream_end else ""))
        sys.stdout.flush()
