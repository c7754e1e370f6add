"""Turns the roles of docstrings, such as :func:`diff_attention`, into links of the site: an extension of griffe."""

import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([\w.]+)`")
_DOCUMENTED = re.compile(r"^::: ([\w.]+)$", flags=re.MULTILINE)


class DocstringRoles(griffe.Extension):
    """Links a name that the API pages document, and shows any other name as code.

    Args:
        pages: the folder of the API pages.
    """

    def __init__(self, pages: str) -> None:
        super().__init__()
        texts = (file.read_text(encoding="utf-8") for file in Path(pages).glob("*.md"))
        documented = [name for text in texts for name in _DOCUMENTED.findall(text)]
        self.by_last_name = {name.rpartition(".")[2]: name for name in documented}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of each object as griffe finds it."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(self._link, obj.docstring.value)

    def _link(self, match: re.Match[str]) -> str:
        last = match[1].rpartition(".")[2]
        target = self.by_last_name.get(last)
        return f"`{last}`" if target is None else f"[`{last}`][{target}]"
