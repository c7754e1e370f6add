"""The pieces of a Markdown document. Everything that is not markup is escaped."""

import re
from collections.abc import Iterable, Sequence

from diff_transformer.report.experiment_tables import Table

# Tells a document of ours from somebody's file of the same name.
GENERATOR = "<!-- Written by diff-transformer report; it is replaced as a whole. -->"


def text(words: str) -> str:
    """Words that mean nothing to Markdown or HTML, on one line."""
    flat = " ".join(words.split())
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", flat.replace("&", "&amp;"))


def code(words: str) -> str:
    """Words as they are typed, between as many backticks as they do not hold."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", words)), default=0))
    flat = " ".join(words.split())
    return f"{fence}{' ' if '`' in flat else ''}{flat}{' ' if '`' in flat else ''}{fence}"


def table(content: Table, links: Sequence[str] = ()) -> str:
    """A table; `links` are anchors for the first cells of its first rows."""
    rows = [[text(cell) for cell in row] for row in content.rows]
    for row, anchor in zip(rows, links, strict=False):
        row[0] = f"[{row[0]}](#{anchor})"
    lines = [[text(cell) for cell in content.head], ["---"] * len(content.head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {text(sentence)}" for sentence in sentences)


def figure(path: str, alt: str) -> str:
    """A figure that is a link to itself at full size."""
    return f"[![{text(alt)}]({path})]({path})"
