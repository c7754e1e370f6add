"""Defines the records of a measured number, of a comparison of two variants, and of the file that holds both."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from diff_transformer.lab.coordinates import NOWHERE, Coordinates


class _NullAsNaN:
    """Tells pydantic to read null, which files hold for a number that is not finite, as NaN."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # Here and not above: `info` writes an environment without what only reading needs.
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: math.nan if value is None else value, handler(source)
        )


Number = Annotated[float, _NullAsNaN()]
Interval = tuple[Number, Number]
Better = Literal["higher", "lower"]
Verdict = Literal["reproduced", "inconclusive", "contrary", "not comparable"]


class FileRecord:
    """A record that is read from a file strictly: no value of another type, no unknown key.

    The field `lambda_` is "lambda" in files; the word is Python's.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "alias_generator": lambda name: name.rstrip("_"),
    }


@dataclass(frozen=True, kw_only=True)
class Result(FileRecord):
    """One measured value of one variant.

    `interval` is the 95 % interval that `method` describes, `n` the number of things averaged over, `better` the
    direction in which the measure improves (None: neither), `coordinates` where on its axes it was measured
    (e.g. at a depth of 0.25); what stands for the whole has none.
    `documents`, which the results of an experiment leave out, are the (sum, count) of each document, in an order that
    all variants share; the value is then Σ sum / Σ count.
    """

    name: str
    variant: str
    value: Number
    interval: Interval | None = None
    n: int | None = None
    unit: str = ""
    seed: int | None = None
    better: Better | None = None
    coordinates: Coordinates = NOWHERE
    method: str = ""
    documents: tuple[tuple[Number, Number], ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.variant:
            raise ValueError(f"a result needs a name and a variant, got name={self.name!r}, variant={self.variant!r}")
        if self.better not in ("higher", "lower", None):
            raise ValueError(f"better must be 'higher', 'lower' or None, got {self.better!r}")
        if self.interval is not None and (len(self.interval) != 2 or self.interval[0] > self.interval[1]):
            raise ValueError(f"the interval of {self.name} must be (low, high), got {self.interval!r}")


@dataclass(frozen=True, kw_only=True)
class Baseline(FileRecord):
    """The accuracy that a model reaches without having learned what the measure tests.

    Attributes:
        name, coordinates: the measure and where it was taken, as in the records.
        chance: the accuracy of guessing among all possible answers.
        floor: the accuracy of knowing which answers occur in the context, and how often, without knowing which of them
            belongs to which question. Not below `chance`.
        by_elimination: the accuracy of leaving out, besides, the answers that were already given to other questions;
            None where there are none in view.
        steps: of training, after which the measure was taken.
        accuracy, accuracy_coordinates: what is compared with these levels; the measure itself where `accuracy` is None.
        is_accuracy: whether the measure is an accuracy, and so stands beside these levels. One that is not, such as a
            variance of accuracies, means nothing for a model at the floor.
    """

    name: str
    coordinates: Coordinates = NOWHERE
    chance: Number
    floor: Number
    by_elimination: Number | None = None
    steps: int
    accuracy: str | None = None
    accuracy_coordinates: Coordinates = NOWHERE
    is_accuracy: bool = True

    def levels(self) -> dict[str, float]:
        """The known levels by name, the lowest first."""
        levels = {"chance": self.chance, "floor": self.floor}
        return levels if self.by_elimination is None else levels | {"by elimination": self.by_elimination}


@dataclass(frozen=True, kw_only=True)
class Headline(FileRecord):
    """The comparison that an experiment is about, by the fields of `Comparison` that name it."""

    name: str
    variant: str = "diff"
    against: str = "softmax"
    coordinates: Coordinates = NOWHERE

    def names(self, row: "Comparison") -> bool:
        """Whether `row` is that comparison."""
        own = (self.name, self.variant, self.against, self.coordinates)
        return (row.name, row.variant, row.against, row.coordinates) == own


@dataclass(frozen=True, kw_only=True)
class Comparison(FileRecord):
    """Two variants in one measure: what the paper found of them, what we found, and what that says.

    Attributes:
        variant, against: the claim is that `variant` is the better one; without a claim (`better` None), just the two.
        better: the direction in which the measure improves; None where nothing is claimed, and so nothing judged.
        exploratory: whether the claim that is judged is a question of this project's; if not, it is the paper's.
        paper: the paper's values of `variant` and of `against`; NaN for one it does not give, None for neither.
        ours: the means over seeds of `variant` and of `against`.
        differences, difference: `variant` − `against` for each seed that both have, and the mean.
        interval: the mean's 95 % interval, as `method` describes; None where one seed tells no spread.
        verdict: "reproduced" where all of the interval is on the claim's side of 0, "contrary" where all of it is on
            the other, else "inconclusive"; "not comparable" where `judge` finds that the variants have not
            learned enough for the difference to mean anything; None without a claim.
        seeds_needed: with how many seeds a difference of this size and spread would come out in 80 % of such
            experiments, the documents staying as they are; given where the verdict is "inconclusive" and the number can
            be told. More than there are.
        documents_needed: the verdict is "inconclusive" for want of documents: over the seeds alone it would not be, or
            what other documents might do is as large as the difference, whatever the number of seeds.
        reason: why the difference is not known (NaN), where that is not that a run diverged.
        baseline: what a model comes to that has not learned what is measured, where that is known.
        at_floor, at_elimination: which of the two are not above its floor, or not above what elimination gives.
    """

    name: str
    variant: str
    against: str
    ours: tuple[Number, Number]
    difference: Number
    differences: tuple[Number, ...] = ()
    interval: Interval | None = None
    method: str = ""
    coordinates: Coordinates = NOWHERE
    unit: str = ""
    better: Better | None = None
    paper: tuple[Number, Number] | None = None
    verdict: Verdict | None = None
    seeds_needed: int | None = None
    documents_needed: bool = False
    reason: str = ""
    exploratory: bool = False
    baseline: Baseline | None = None
    at_floor: tuple[str, ...] = ()
    at_elimination: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.variant or not self.against:
            given = f"{self.name!r}, {self.variant!r}, {self.against!r}"
            raise ValueError(f"a comparison needs a name and two variants, got {given}")
        if (self.better is None) != (self.verdict is None):
            raise ValueError(
                f"a verdict on {self.name} goes with a direction, got {self.verdict!r} and {self.better!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Environment(FileRecord):
    """Where a number comes from: the command line, the device's name, versions, and the commit (None outside git)."""

    command: str
    device: str
    versions: dict[str, str]
    commit: str | None
    created: str


@dataclass(frozen=True, kw_only=True)
class ResultsFile(Environment):
    """The content of a `results.json`: an environment, the settings of the run, its results, and what they say.

    `notes` are sentences that a reader of the numbers must know. `headline` names the comparison that stands for the
    experiment in an overview, `baselines` say what its accuracies are to be read against.
    """

    title: str
    settings: dict[str, Any]
    records: tuple[Result, ...]
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    headline: Headline | None = None
    baselines: tuple[Baseline, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionExample(FileRecord):
    """The content of an `attention.json`: the maps of one head of every variant, for one example.

    `maps[variant][map]` is an (N, N) matrix, rows are queries; positions count from 0, `layers` and `heads` from 1.
    """

    tokens: tuple[str, ...]
    layers: dict[str, int]
    heads: dict[str, int]
    query_position: int
    answer_positions: tuple[int, ...]
    needle_positions: tuple[int, ...]
    maps: dict[str, dict[str, list[list[Number]]]]
    lambda_: Number

    def __post_init__(self) -> None:
        if not self.layers.keys() == self.heads.keys() == self.maps.keys():
            raise ValueError("layers, heads and maps must be of the same variants")
        size = len(self.tokens)
        positions = (self.query_position, *self.answer_positions, *self.needle_positions)
        if any(not 0 <= position < size for position in positions):
            raise ValueError(f"positions must lie in 0 … {size - 1}, got {positions}")
        for variant, maps in self.maps.items():
            for name, rows in maps.items():
                if len(rows) != size or any(len(row) != size for row in rows):
                    raise ValueError(f"the map {name} of {variant} must have {size} rows of {size} weights")


@dataclass(frozen=True, kw_only=True)
class Samples(FileRecord):
    """The content of a `samples.json`: one prompt and how each variant goes on from it."""

    prompt: str
    diff: str
    softmax: str
