"""Puts the page together: one HTML file with its style, its code and its data, which loads nothing else."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The bundle of the sources in the repository's folder `web`: `npm run build` there writes it.
BUNDLE = Path(__file__).resolve().parent / "bundle"


def page_html(data: Mapping[str, Any], *, title: str, may_ask: bool) -> str:
    """The page with data for it.

    Args:
        data: what web/src/main.js reads; JSON without NaN.
        title: of the window.
        may_ask: whether the page asks the server that it came from. Otherwise it can reach nothing at all: the
            browser itself refuses, by the page's Content-Security-Policy.
    """
    script = (BUNDLE / "explorer.js").read_text(encoding="utf-8")
    style = (BUNDLE / "explorer.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if may_ask else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    # No text of the data can end its element, as none of its characters is a "<".
    embedded = json.dumps(data, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    safe_title = title.replace("&", "&amp;").replace("<", "&lt;")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="referrer" content="no-referrer">',
            '<link rel="icon" href="data:,">',
            f"<title>{safe_title}</title>",
            f"<style>{style}</style>",
            '<div id="explorer"></div>',
            f'<script type="application/json" id="explorer-data">{embedded}</script>',
            f'<script type="module">{script}</script>',
            "</html>",
            "",
        )
    )
