"""Writes the page with one text and all answers about it, so that it works from disk without a server or a network.

The page computes A1 − λA2 of each head for any λ from the maps of the learned one. What the model predicts is recorded
for steps of λ, of all layers and of each.
"""

import base64
from collections.abc import Iterable
from typing import Any

from diff_transformer.explorer.explorer import Explorer
from diff_transformer.explorer.page import page_html

LARGEST_PAGE = 32_000_000  # characters of maps
STEPS = tuple(step / 20 for step in range(-10, 31))  # λ of all layers
LAYER_STEPS = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # λ of one layer
_PICTURE = 48  # pixels of a side, of a head's picture
# What differs between runs of one text with different λ.
_VARYING = ("next", "divergence", "loss", "lambdas", "answer_share", "answer_probability")


def recorded_page(explorer: Explorer) -> str:
    """The page of an explorer's first example, as HTML.

    Raises:
        ValueError: the explorer has no example, or its maps are too large for a page.
    """
    described = explorer.describe()
    if not described["examples"]:
        raise ValueError("A page needs a text; the explorer has no example.")
    example = described["examples"][0]
    length = len(explorer.run({"text": example["text"]})["tokens"])
    _check_size(described["models"].values(), length)
    recorded: dict[str, Any] = {"runs": {}, "maps": {}}
    for side, model in described["models"].items():
        question = {"side": side, "text": example["text"]}
        if example["answer"] is not None and (side == "left" or described["shared_vocabulary"]):
            question["answer"] = example["answer"]
        places = [(layer, head) for layer in range(1, model["layers"] + 1) for head in range(1, model["heads"] + 1)]
        recorded["maps"][side] = {
            f"{layer}.{head}": base64.b64encode(explorer.head_map({**question, "layer": layer, "head": head})).decode()
            for layer, head in places
        }
        recorded["runs"][side] = {"learned": explorer.run({**question, "picture": _PICTURE})}
        if model["subtracts"]:
            layers = range(1, model["layers"] + 1)
            recorded["runs"][side] |= {
                "all": [_step(explorer, question, value, {"all": value}) for value in STEPS],
                "layers": {
                    str(layer): [
                        _step(explorer, question, value, {"layers": {str(layer): value}}) for value in LAYER_STEPS
                    ]
                    for layer in layers
                },
            }
    data = {
        "mode": "recorded",
        **described,
        "examples": [example],
        "draws_examples": False,
        "recorded": recorded,
    }
    return page_html(data, title=f"Attention of {described['models']['left']['name']}", may_ask=False)


def _step(explorer: Explorer, question: dict[str, Any], value: float, lambdas: dict[str, Any]) -> dict[str, Any]:
    run = explorer.run({**question, "lambdas": lambdas})
    return {"value": value, "run": {name: run[name] for name in _VARYING if name in run}}


def _check_size(models: Iterable[dict[str, Any]], length: int) -> None:
    """Refuse maps that no browser would load with pleasure."""
    size = sum(
        model["layers"] * model["heads"] * length * (length + 1) // 2 * (4 if model["subtracts"] else 2) * 4 // 3
        for model in models
    )
    if size > LARGEST_PAGE:
        raise ValueError(
            f"The maps of {length:,} tokens take {size / 1e6:.0f} MB, and a page holds {LARGEST_PAGE / 1e6:.0f} MB; "
            "give a shorter --text."
        )
