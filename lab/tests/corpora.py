"""Documents at hand as a corpus."""

from pathlib import Path

from diff_lab.data import TextFiles


def written(documents: list[str], folder: Path) -> TextFiles:
    """Each document in a file of its own."""
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_text(document, encoding="utf-8")
    return TextFiles([folder])
