"""Defines the records of a measured number, of a comparison of two variants, and of the file that holds both."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from diff_lab.coordinates import NO_COORDINATES, Coordinates

# Files hold null for a number that is not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Interval = tuple[Number, Number]
Better = Literal["higher", "lower"]
# "still learning" stands in files of earlier versions alone; `judge` puts the interval's verdict in its place.
Verdict = Literal["reproduced", "inconclusive", "contrary", "still learning", "not comparable"]

# The preset of results that compare variants of a recipe of the user's; all others are of an experiment's presets.
OWN = "own"


class FileRecord:
    """A record that is read from a file strictly: no value of another type, no unknown key."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, kw_only=True)
class Result(FileRecord):
    """One measured value of one variant."""

    name: str
    variant: str
    value: Number
    interval: Interval | None = None  # 95 %, as `method` describes
    n: int | None = None  # the number of things averaged over
    unit: str = ""
    seed: int | None = None
    better: Better | None = None  # the direction in which the number improves; None: neither
    coordinates: Coordinates = NO_COORDINATES  # where on its axes it was measured; an overall value has none
    method: str = ""
    # The (sum, count) of each document, in an order that all variants share; the value is then Σ sum / Σ count. The
    # results of an experiment leave them out.
    documents: tuple[tuple[Number, Number], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Baseline(FileRecord):
    """The accuracy that a model reaches without having learned the task."""

    name: str
    coordinates: Coordinates = NO_COORDINATES
    chance: Number  # of guessing among all possible answers
    ceiling: Number | None = None  # of reading the context as well as anybody could; None where that is not known
    floor: Number  # of knowing which answers occur in the context, but not which belongs to which question
    by_elimination: Number | None = None  # of leaving out, besides, the answers already given; None where none are
    steps: int  # of training, after which it was measured
    # The accuracy that is compared with these levels, if it is not the number itself.
    accuracy: str | None = None
    accuracy_coordinates: Coordinates = NO_COORDINATES
    # Another number, such as a variance of accuracies, does not stand beside these levels.
    is_accuracy: bool = True

    def levels(self) -> dict[str, float]:
        """Return the known levels by name, the lowest first."""
        levels = {"chance": self.chance, "floor": self.floor}
        return levels if self.by_elimination is None else levels | {"by elimination": self.by_elimination}


@dataclass(frozen=True, kw_only=True)
class Headline(FileRecord):
    """The comparison that an experiment is about, by the fields of `Comparison` that name it."""

    name: str
    variant: str = "diff"
    against: str = "softmax"
    coordinates: Coordinates = NO_COORDINATES
    claim: str = ""  # what it claims, in words; results of earlier versions do not tell

    def names(self, row: "Comparison") -> bool:
        """Return whether `row` is that comparison."""
        fields = ("name", "variant", "against", "coordinates")
        return all(getattr(row, name) == getattr(self, name) for name in fields)


@dataclass(frozen=True, kw_only=True)
class Comparison(FileRecord):
    """Two variants in one number: the paper's values, ours, and the verdict on the claim that `variant` is better."""

    name: str
    variant: str
    against: str
    ours: tuple[Number, Number]  # the means over seeds of `variant` and of `against`
    difference: Number  # the mean of the `differences`
    differences: tuple[Number, ...] = ()  # `variant` − `against` for each seed that both have
    interval: Interval | None = None  # the mean's, 95 %; None where one seed tells no spread
    method: str = ""  # of the interval
    coordinates: Coordinates = NO_COORDINATES
    unit: str = ""
    better: Better | None = None  # None where nothing is claimed, and so nothing judged
    paper: tuple[Number, Number] | None = None  # the paper's values of the two; NaN for one it does not give
    verdict: Verdict | None = None
    # With how many seeds such a difference would come out in 80 % of experiments; of an "inconclusive" one, if known.
    seeds_needed: int | None = None
    documents_needed: bool = False  # whether it is "inconclusive" for want of documents, whatever the number of seeds
    reason: str = ""  # why the difference is not known (NaN), where that is not that a run diverged
    exploratory: bool = False  # whether the claim is a question that the paper leaves open
    quality: bool = False  # whether it says how well a variant has learned, such as an accuracy or a loss
    steps: int | None = None  # of the variants' training, where their validation curves are known
    still_learning: tuple[str, ...] = ()  # which of the two were still training at its end
    baseline: Baseline | None = None  # what a model comes to that has not learned what is measured, if known
    at_floor: tuple[str, ...] = ()  # which of the two are not above its floor
    at_elimination: tuple[str, ...] = ()  # which are above its floor, and not above what elimination gives


@dataclass(frozen=True, kw_only=True)
class Environment(FileRecord):
    """The origin of a number: the command line, the device's name, versions, and the commit (None outside git)."""

    command: str
    device: str
    versions: dict[str, str]
    commit: str | None
    created: str


@dataclass(frozen=True, kw_only=True)
class ResultsFile(Environment):
    """The content of a `results.json`: an environment, the settings of the run, its results, and their verdicts."""

    title: str
    settings: dict[str, Any]
    records: tuple[Result, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()  # sentences that a reader of the numbers must know
    headline: Headline | None = None  # the comparison that stands for the experiment in an overview
    baselines: tuple[Baseline, ...] = ()  # the levels to read its accuracies against


@dataclass(frozen=True, kw_only=True)
class CardRecord(FileRecord):
    """The content of the `card.json` of a model that comes with the package, beside its recipe and its results."""

    summary: str  # what it is, in a few words
    use: str  # what it is for
    limits: str
    data: str  # what it was trained on, and where that is to be had
    data_license: str
    license: str  # of the weights, by its name on the Hub
    commit: str  # of the code that trained it
    parameters: int
    dtype: str
    bytes: int
    validation: dict[str, Number]  # that training logged at its last step
    tolerance: Number  # of each number of `results.json`, measured again on another processor
    held_out: str | None  # where the text comes from that its numbers are measured on; None for a generated task
