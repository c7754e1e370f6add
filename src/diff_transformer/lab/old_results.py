"""Translates results files of earlier versions into the words of this one, before they are read."""

import re
from collections.abc import Mapping
from typing import Any

# Names of earlier versions → those of now, in records, comparisons and headlines, and in the settings of an experiment.
_FIELDS = {"arm": "variant"}
_SETTINGS = {"asked": "request", "arms": "variants"}
_PLACES = {"group": "coordinates", "accuracy_group": "accuracy_coordinates"}

# What a part of a group's name was → the names of its numbers and words, by the pattern's own groups.
_SIZE = r"(?P<parameters>\d+(?:\.\d+)?[MB])"
_PARTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"N(?P<needles>\d+) R(?P<queries>\d+)",
        r"depth (?P<depth>\d+ %)",
        r"(?P<depth>\d+–\d+ %)",
        r"(?P<position>\d+–\d+)",
        r"first (?P<first_tokens>\d+)",
        r"(?P<tokens>\d+(?:,\d{3})*) tokens",
        r"(?P<length>all lengths)",
        r"noise (?P<noise>[\d.]+)",
        r"(?P<shots>\d+) shots",
        r"(?P<orders>random|alternating) orders",
        r"(?P<examples>\d+)-shot",
        r"operations (?P<operations>\d+)",
        r"step (?P<step>\d+)",
        r"(?P<phase>before training|in training)",
        r"(?P<bits>\d+) bits per (?P<granularity>tensor|row)",
        r"(?P<bits>whole)",
        r"top-(?P<rank>\d+)",
        r"(?P<rank>median)",
        r"context × (?P<context_factor>\d+)",
        _SIZE,
        r"(?P<learning_rate>\d+(?:\.\d+)?(?:e[+-]?\d+)?)",
    )
)
_TIMES = {"M": 1e6, "B": 1e9}


def translated(content: Any) -> Any:
    """The JSON content of a results file in the words of this version; what is of this version stays as it is."""
    if not isinstance(content, dict):
        return content
    found = dict(content)
    for name in ("records", "comparisons", "baselines"):
        if isinstance(found.get(name), list):
            found[name] = [_record(part) for part in found[name]]
    if "headline" in found:
        found["headline"] = _record(found["headline"])
    if isinstance(found.get("settings"), dict):
        found["settings"] = _settings(found["settings"])
    return found


def coordinates_of(group: str | None) -> dict[str, Any]:
    """The coordinates that an earlier version told as one text: "noise 0.1, 8 shots"; {"part": …} where it is none."""
    found: dict[str, Any] = {}
    for part in [] if group is None else group.split(", "):
        match = next((match for pattern in _PARTS if (match := pattern.fullmatch(part))), None)
        if match is None:
            return {"part": group}
        for name, text in match.groupdict().items():
            # A training's tokens stood behind its model's size; alone they were the length of a context.
            is_length = name == "tokens" and "parameters" not in found
            found["length" if is_length else name] = _value(text)
    return found


def _value(text: str) -> Any:
    if "–" in text:
        low, high = text.removesuffix(" %").split("–")
        return [int(low) / 100, int(high) / 100] if text.endswith("%") else [int(low), int(high)]
    if text.endswith("%"):
        return int(text.removesuffix(" %")) / 100
    if text[-1] in _TIMES:
        return round(float(text[:-1]) * _TIMES[text[-1]])
    number = text.replace(",", "")
    if number.isdigit():
        return int(number)
    return float(number) if number[0].isdigit() else text


def _record(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    found = _renamed(part, _FIELDS)
    for old, name in _PLACES.items():
        if old in found:
            found[name] = _coordinates(found.pop(old))
    if "claimed_by" in found:
        found["exploratory"] = found.pop("claimed_by") == "us"
    return found


def _coordinates(group: Any) -> Any:
    return coordinates_of(group) if group is None or isinstance(group, str) else group


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = _renamed(settings, _SETTINGS)
    if isinstance(found.get("variants"), list):
        found["variants"] = [_record(variant) for variant in found["variants"]]
    if isinstance(found.get("request"), dict):
        found["request"] = _settings(found["request"])
    # A demo's settings hold recipes by name.
    for name, recipe in found.items():
        if isinstance(recipe, dict) and isinstance(recipe.get("model"), dict):
            found[name] = {**recipe, "model": _renamed(recipe["model"], {"start_from": "init_from"})}
    return found


def _renamed(part: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in part.items()}
