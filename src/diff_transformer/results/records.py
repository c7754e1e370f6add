"""One typed record for every measured number, for every comparison of arms, and for the file that holds both."""

from dataclasses import dataclass
from typing import Any, Literal

Interval = tuple[float, float]
Better = Literal["higher", "lower"]
Verdict = Literal["reproduced", "inconclusive", "contrary", "not comparable"]
Claimant = Literal["paper", "us"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured value of one arm.

    `interval` is the 95 % interval that `method` describes, `n` the number of things averaged over, `better` the
    direction in which the measure improves (None: neither), `group` the part measured (e.g. a depth "0–25 %").
    `documents`, which the results of an experiment leave out, are the (sum, count) of each document, in an order that
    all arms share; the value is then Σ sum / Σ count.
    """

    name: str
    arm: str
    value: float
    interval: Interval | None = None
    n: int | None = None
    unit: str = ""
    seed: int | None = None
    better: Better | None = None
    group: str | None = None
    method: str = ""
    documents: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.arm:
            raise ValueError(f"a result needs a name and an arm, got name={self.name!r}, arm={self.arm!r}")
        if self.better not in ("higher", "lower", None):
            raise ValueError(f"better must be 'higher', 'lower' or None, got {self.better!r}")
        if self.interval is not None and (len(self.interval) != 2 or self.interval[0] > self.interval[1]):
            raise ValueError(f"the interval of {self.name} must be (low, high), got {self.interval!r}")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The accuracy that a model reaches without having learned what the measure tests.

    Attributes:
        name, group: the measure and its part, as in the records.
        chance: the accuracy of guessing among all possible answers.
        floor: the accuracy of knowing which answers occur in the context, and how often, without knowing which of them
            belongs to which question. Not below `chance`.
        by_elimination: the accuracy of leaving out, besides, the answers that were already given to other questions;
            None where there are none in view.
        steps: of training, after which the measure was taken.
        accuracy, accuracy_group: the accuracy that is compared with these levels; the measure itself where it is None.
        is_accuracy: whether the measure is an accuracy, and so stands beside these levels. One that is not, such as a
            variance of accuracies, means nothing for a model at the floor.
    """

    name: str
    group: str | None
    chance: float
    floor: float
    by_elimination: float | None = None
    steps: int
    accuracy: str | None = None
    accuracy_group: str | None = None
    is_accuracy: bool = True


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The comparison that an experiment is about, by the fields of `Comparison` that name it."""

    name: str
    arm: str = "diff"
    against: str = "softmax"
    group: str | None = None

    def names(self, row: "Comparison") -> bool:
        """Whether `row` is that comparison."""
        return (row.name, row.arm, row.against, row.group) == (self.name, self.arm, self.against, self.group)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two arms in one measure: what the paper found of them, what we found, and what that says.

    Attributes:
        name: the measure, as in the records.
        arm, against: the claim is that `arm` is the better one; without a claim (`better` None), simply the two.
        group: the part measured, as in the records.
        unit: of the values.
        better: the direction in which the measure improves; None where nothing is claimed, and so nothing judged.
        claimed_by: whose claim is judged: the paper's, or one that is ours to ask.
        paper: the paper's values of `arm` and of `against`; NaN for one it does not give, None for neither.
        ours: the means over seeds of `arm` and of `against`.
        differences: `arm` − `against`, one for each seed that both have.
        difference: their mean.
        interval: its 95 % interval, as `method` describes; None where one seed tells no spread.
        verdict: "reproduced" where all of the interval is on the claim's side of 0, "contrary" where all of it is on
            the other, else "inconclusive"; "not comparable" where `results.judge` finds that the variants have not
            learned enough for the difference to mean anything; None without a claim.
        seeds_needed: with how many seeds a difference of this size and spread would come out in 80 % of such
            experiments, the documents staying as they are; given where the verdict is "inconclusive" and the number can
            be told. More than there are.
        documents_needed: the verdict is "inconclusive" for want of documents: over the seeds alone it would not be, or
            what other documents might do is as large as the difference, whatever the number of seeds.
        reason: why the difference is not known (NaN), where that is not that a run diverged.
        baseline: what a model comes to that has not learned what is measured, where that is known.
        at_floor: which of the two are not above its floor.
        at_elimination: which of the two are above its floor, and not above what elimination gives.
    """

    name: str
    arm: str
    against: str
    ours: tuple[float, float]
    difference: float
    differences: tuple[float, ...] = ()
    interval: Interval | None = None
    method: str = ""
    group: str | None = None
    unit: str = ""
    better: Better | None = None
    paper: tuple[float, float] | None = None
    verdict: Verdict | None = None
    seeds_needed: int | None = None
    documents_needed: bool = False
    reason: str = ""
    claimed_by: Claimant = "paper"
    baseline: Baseline | None = None
    at_floor: tuple[str, ...] = ()
    at_elimination: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.arm or not self.against:
            given = f"{self.name!r}, {self.arm!r}, {self.against!r}"
            raise ValueError(f"a comparison needs a name and two arms, got {given}")
        if (self.better is None) != (self.verdict is None):
            raise ValueError(
                f"a verdict on {self.name} goes with a direction, got {self.verdict!r} and {self.better!r}"
            )


@dataclass(frozen=True, kw_only=True)
class Environment:
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
class AttentionExample:
    """The content of an `attention.json`: the maps of one head of every arm, for one example.

    `maps[arm][map]` is an (N, N) matrix, rows are queries; positions count from 0, `layers` and `heads` from 1.
    """

    tokens: tuple[str, ...]
    layers: dict[str, int]
    heads: dict[str, int]
    query_position: int
    answer_positions: tuple[int, ...]
    needle_positions: tuple[int, ...]
    maps: dict[str, dict[str, list[list[float]]]]
    # "lambda" in the file; the word is Python's
    lambda_: float

    def __post_init__(self) -> None:
        if not self.layers.keys() == self.heads.keys() == self.maps.keys():
            raise ValueError("layers, heads and maps must be of the same arms")
        size = len(self.tokens)
        positions = (self.query_position, *self.answer_positions, *self.needle_positions)
        if any(not 0 <= position < size for position in positions):
            raise ValueError(f"positions must lie in 0 … {size - 1}, got {positions}")
        for arm, named in self.maps.items():
            for name, rows in named.items():
                if len(rows) != size or any(len(row) != size for row in rows):
                    raise ValueError(f"the map {name} of {arm} must have {size} rows of {size} weights")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The content of a `samples.json`: one prompt and how each arm goes on from it."""

    prompt: str
    diff: str
    softmax: str
