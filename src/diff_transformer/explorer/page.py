"""Puts the page together: one HTML file with its style, its code and its data, which loads nothing else.

docs/explorer.md says what a recorded page, which has no server, holds and what it computes.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.explorer.explorer import Explorer

# The bundle of the sources in the repository's folder `web`: `npm run build` there writes it.
BUNDLE = Path(__file__).resolve().parent / "bundle"
LARGEST_PAGE = 32_000_000  # characters of maps
STEPS = tuple(step / 20 for step in range(-10, 41))  # the factor of all λ
FEW_STEPS = tuple(step / 4 for step in range(-2, 7))  # λ of one layer, or of one head
MOST_HEADS = 64  # of a model whose heads are moved one by one: each takes a run for each of the few steps
WRITTEN = 16  # tokens after the text
_DIGITS = 5
# What the page knows without a run: the text's tokens are recorded once, and the learned λ with them.
_SHARED = ("side", "tokens", "pieces", "learned_lambdas")


def page_html(data: Mapping[str, Any], *, title: str, may_ask: bool) -> str:
    """Return the page with data for it.

    Args:
        data: input of web/src/main.js; JSON without NaN.
        title: of the window.
        may_ask: whether the page asks the server that it came from. Otherwise it can reach nothing at all: the
            browser itself refuses, by the page's Content-Security-Policy.
    """
    script = (BUNDLE / "explorer.js").read_text(encoding="utf-8")
    style = (BUNDLE / "explorer.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    asked = "'self'" if may_ask else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {asked}; base-uri 'none'; form-action 'none'"
    )
    # No text of the data can end its element, as none of its characters is a "<".
    embedded = json.dumps(data, allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
<div id="explorer"></div>
<script type="application/json" id="explorer-data">{embedded}</script>
<script type="module">{script}</script>
</html>
"""


def recorded_page(explorer: Explorer) -> str:
    """Return the page of an explorer's first example, as HTML.

    Raises:
        ValueError: the explorer has no example, or its maps are too large for a page.
    """
    described = explorer.describe()
    if not described["examples"]:
        raise ValueError("A page needs a text; the explorer has no example.")
    example = described["examples"][0]
    length = len(explorer.run({"text": example["text"]})["tokens"])
    is_image = described["models"]["left"]["grid"] is not None
    length += 0 if is_image else WRITTEN
    weights = length * length if is_image else length * (length + 1) // 2
    size = sum(
        model["layers"] * model["heads"] * weights * (4 if model["subtracts"] else 2) * 4 // 3
        for model in described["models"].values()
    )
    if size > LARGEST_PAGE:
        raise ValueError(
            f"The maps of {length:,} tokens take {size / 1e6:.0f} MB, and a page holds {LARGEST_PAGE / 1e6:.0f} MB; "
            f"give a shorter --text ({WRITTEN} of its tokens are what the model writes after it), or smaller images."
        )
    recorded = {}
    for side, model in described["models"].items():
        question = {"side": side, "text": example["text"]}
        if example["answer"] is not None and (side == "left" or described["shared_vocabulary"]):
            question["answer"] = example["answer"]
        recorded[side] = _recorded(explorer, model, question)
        model["most_tokens"] = len(recorded[side]["tokens"])
    strip = described["strip"]
    asked = {"text": example["text"], "answer": example["answer"]}
    strip["points"] = [_shortened(explorer.strip({**asked, "factor": factor})) for factor in strip["factors"]]
    data = {"mode": "recorded", **described, "examples": [example], "draws_examples": False, "recorded": recorded}
    return page_html(data, title=f"Attention of {described['models']['left']['name']}", may_ask=False)


def _recorded(explorer: Explorer, model: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    """Return all answers about one model, as web/src/recorded_source.js reads them."""
    runs = [explorer.run(question)]
    room = model["most_tokens"] - len(runs[0]["tokens"])
    append: list[int] = []
    while len(append) < min(WRITTEN, room):
        append.append(explorer.next_token({**question, "append": append})["token"])
        runs.append(explorer.run({**question, "append": append}))
    layers, heads = range(1, model["layers"] + 1), range(1, model["heads"] + 1)
    maps = {
        f"{layer}.{head}": explorer.head_map({**question, "append": append, "layer": layer, "head": head})
        for layer in layers
        for head in heads
    }
    steps: dict[str, Sequence[float]] = {}
    if model["subtracts"]:
        steps = {"factor": STEPS, **dict.fromkeys(map(str, layers), FEW_STEPS)}
        if len(maps) <= MOST_HEADS:
            steps |= dict.fromkeys(maps, FEW_STEPS)
    moved: dict[str, list[dict[str, Any]]] = {place: [] for place in steps}
    for place, values in steps.items():
        for value in values:
            at = {"heads" if "." in place else "layers": {place: value}}
            lambdas = {"factor": value} if place == "factor" else at
            moved[place].append({"value": value, "run": _shortened(explorer.run({**question, "lambdas": lambdas}))})
    rollout = explorer.run({**question, "picture": 1})["heads"]["rollout"] if model["grid"] else None
    return {
        **{name: runs[-1][name] for name in _SHARED},
        "rollout": _shortened(rollout),
        "maps": {place: base64.b64encode(data).decode() for place, data in maps.items()},
        "runs": [_shortened(run) for run in runs],
        "moved": moved,
    }


def _shortened(value: Any) -> Any:
    """Return a run without the fields that all runs share, its numbers with as many digits as are shown."""
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items() if name not in _SHARED}
    if isinstance(value, list):
        return [_shortened(part) for part in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
