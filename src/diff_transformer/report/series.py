"""Records as lines: where the groups of a measure are numbers (sizes, tokens, bits), the measure is drawn over them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from diff_transformer.report.bands import Places
from diff_transformer.report.figures import ARM_COLOURS, ARM_MARKERS, MUTED, Series
from diff_transformer.report.rows import arm_label, arms_of
from diff_transformer.report.verdicts import ARROWS
from diff_transformer.results import Baseline, Comparison, Interval, Result

# Fewer are no line.
FEWEST = 3
# "0–20 %" stands at its middle; "0.5M" is a number of parameters.
_RANGE = r"\d+(?:\.\d+)?–\d+(?:\.\d+)?(?: ?%)?"
_PLAIN = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?[kMB]?(?: ?%)?(?![A-Za-z])"
_NUMBER = re.compile(rf"(?<![\w.])(?:{_RANGE}|{_PLAIN})|(?<=[A-Z]){_PLAIN}")
# A cell of needles with one of its numbers taken out: "N… R2".
_CELL = re.compile(r"N\S+ R\S+")
_TIMES = {"k": 1e3, "M": 1e6, "B": 1e9}
# Words around the number of a group → what the axis is called, where the words alone do not say it.
_AXES = {
    "first": "tokens from the start of the document",
    "step": "step of training",
    "context ×": "length of the context, in lengths of training",
    "top-": "rank by size",
    "depth": "depth in the context",
    "N": "needles",
    "R": "needles asked for",
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Panel:
    """One figure: a measure of several arms over a number.

    Attributes:
        name: the measure.
        part: what the rest of its groups' names says, "" where nothing.
        lines: one for each arm: means over seeds, NaN where one is not known; intervals from the lowest to the highest
            seed, or, with one seed, the measurement's own.
        paper: the paper's values, where it gives as many.
        seeds: over how many.
        own_intervals: whether bands are the measurement's own intervals.
        levels: chance and floor, where they are known at every place.
    """

    name: str
    part: str
    label: str
    places: Places
    lines: tuple[Series, ...]
    paper: tuple[Series, ...]
    seeds: int
    own_intervals: bool
    levels: tuple[Series, ...] = ()


@dataclass(frozen=True)
class _Slot:
    """A group's name with one of its numbers taken out."""

    rest: str
    number: float
    text: str


def panels(
    records: Sequence[Result],
    comparisons: Sequence[Comparison],
    rates: Mapping[str, float],
    baselines: Sequence[Baseline] = (),
) -> Iterator[Panel]:
    """Every measure that was taken at three numbers or more and is not the same at all of them.

    Args:
        records: of all arms and seeds; those of training (sizes, seconds) are not drawn.
        comparisons: what the paper's values are taken from.
        rates: learning rates by group of arms, which name an axis of bare numbers.
        baselines: of the accuracies.
    """
    for name in dict.fromkeys(record.name for record in records):
        if name.startswith("training/"):
            continue
        own = [record for record in records if record.name == name and record.group is not None]
        for slots in _over(list(dict.fromkeys(record.group for record in own if record.group is not None))):
            here = [record for record in own if record.group in slots]
            # What is the same for all arms at every place is no line.
            if len({record.value for record in here}) > 1:
                panel = _panel(name, slots, here, comparisons, rates)
                known = {one.group: one for one in baselines if one.name == name and one.is_accuracy}
                yield replace(panel, levels=tuple(_levels(slots, known))) if slots.keys() <= known.keys() else panel


def _over(groups: Sequence[str]) -> Iterator[dict[str, _Slot]]:
    """Sets of groups that differ in one number, each group with it, ascending; the last such number of their names."""
    templates: dict[str, list[str]] = {}
    for group in groups:
        templates.setdefault(_NUMBER.sub("…", group), []).append(group)
    for template, members in templates.items():
        for slot in reversed(range(template.count("…"))):
            sets: dict[str, dict[str, _Slot]] = {}
            for group in members:
                taken = _take(group, slot)
                sets.setdefault(taken.rest, {})[group] = taken
            found = [one for one in sets.values() if len({taken.number for taken in one.values()}) >= FEWEST]
            if found:
                for one in found:
                    yield dict(sorted(one.items(), key=lambda item: item[1].number))
                break


def _take(group: str, slot: int) -> _Slot:
    match = list(_NUMBER.finditer(group))[slot]
    return _Slot(f"{group[: match.start()]}…{group[match.end() :]}", _value(match[0]), match[0])


def _value(text: str) -> float:
    if "–" in text:
        low, high = text.rstrip(" %").split("–")
        return (float(low) + float(high)) / 2
    times = _TIMES.get(text[-1], 1.0)
    return float(text.rstrip("kMB %").replace(",", "")) * times


def _panel(
    name: str,
    slots: Mapping[str, _Slot],
    records: Sequence[Result],
    comparisons: Sequence[Comparison],
    rates: Mapping[str, float],
) -> Panel:
    numbers = {group: slot.number for group, slot in slots.items()}
    lines, own = [], False
    for number, arm in enumerate(arms_of(records)):
        points: dict[str, list[Result]] = {group: [] for group in slots}
        for record in records:
            if record.arm == arm and record.group is not None:
                points[record.group].append(record)
        taken = {group: found for group, found in points.items() if found}
        own = own or all(len(found) == 1 for found in taken.values())
        lines.append(
            Series(
                arm_label(arm),
                [numbers[group] for group in taken],
                [fmean(record.value for record in found) for found in taken.values()],
                colour=ARM_COLOURS.get(arm),
                intervals=[_band(found) for found in taken.values()],
                marker=ARM_MARKERS.get(arm, _MARKERS[number % len(_MARKERS)]),
            )
        )
    rest = next(iter(slots.values())).rest
    part, words = _words(rest)
    first = records[0]
    unit = f" ({first.unit})" if first.unit else ""
    return Panel(
        name=name,
        part=part,
        label=f"{name.split('/', 1)[-1].replace('_', ' ').replace('/', ' ')}{unit}{ARROWS[first.better]}",
        places=Places(_axis(words, slots, rates), tuple(numbers.values()), tuple(slot.text for slot in slots.values())),
        lines=tuple(lines),
        paper=tuple(_paper(name, numbers, comparisons)),
        seeds=len({record.seed for record in records}),
        own_intervals=own and any(record.interval is not None for record in records),
    )


def _levels(slots: Mapping[str, _Slot], known: Mapping[str | None, Baseline]) -> Iterator[Series]:
    """Chance, floor and elimination as lines; only the highest of those that are the same."""
    x = [slot.number for slot in slots.values()]
    heights: dict[str, list[float | None]] = {
        "by elimination": [known[group].by_elimination for group in slots],
        "floor": [known[group].floor for group in slots],
        "chance": [known[group].chance for group in slots],
    }
    shown: list[list[float]] = []
    for label, values in heights.items():
        y = [value for value in values if value is not None]
        if len(y) == len(x) and y not in shown:
            shown.append(y)
            yield Series(label, x, y, colour=MUTED)


def measure_words(name: str) -> str:
    """A measure's name for a reader: "needles/accuracy_by_depth" is "needles: accuracy by depth"."""
    return name.replace("/", ": ", 1).replace("/", " ").replace("_", " ")


def _band(found: Sequence[Result]) -> Interval | None:
    values = [record.value for record in found]
    if not all(map(math.isfinite, values)):
        return None
    return found[0].interval if len(found) == 1 else (min(values), max(values))


def _words(rest: str) -> tuple[str, str]:
    """What names the figure and what names its axis, of a group's name without its number: "0.5M, … tokens"."""
    # "N… R2" has two numbers with a letter each, as "…, depth 50 %" has two with words.
    parts = [
        part
        for words in rest.split(", ")
        for part in (words.split() if "…" in words and _CELL.fullmatch(words) else [words])
    ]
    (axis,) = [part for part in parts if "…" in part]
    others = [part for part in parts if part != axis]
    alone = not _NUMBER.search(axis.replace("…", ""))
    return ", ".join(others), axis.replace("…", "").strip() if alone else axis


def _axis(words: str, slots: Mapping[str, _Slot], rates: Mapping[str, float]) -> str:
    texts = [slot.text for slot in slots.values()]
    if not words and all(text[-1] in _TIMES for text in texts):
        return "parameters"
    if not words and all(text.endswith("%") for text in texts):
        return "depth in the context"
    if not words and all(rates.get(group) == slot.number for group, slot in slots.items()):
        return "learning rate"
    return _AXES.get(words, words)


def _paper(name: str, numbers: Mapping[str, float], comparisons: Sequence[Comparison]) -> Iterator[Series]:
    """A line for each arm of which the paper gives as many values as a line needs."""
    values: dict[str, dict[float, float]] = {}
    for row in comparisons:
        if row.name == name and row.group is not None and row.group in numbers and row.paper is not None:
            for arm, value in zip((row.arm, row.against), row.paper, strict=True):
                if math.isfinite(value):
                    values.setdefault(arm, {})[numbers[row.group]] = value
    for arm, points in values.items():
        if len(points) >= FEWEST:
            x = sorted(points)
            yield Series(
                arm_label(arm),
                x,
                [points[place] for place in x],
                ARM_COLOURS.get(arm),
                marker=ARM_MARKERS.get(arm, "o"),
            )
