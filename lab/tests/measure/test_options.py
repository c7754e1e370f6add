"""Settings as a user gives them, and those of every measurement and experiment."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, FiniteFloat

from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment
from diff_lab.measure.measurement import (
    MEASUREMENTS,
    Count,
    Counts,
    Measurement,
    MeasurementRequest,
    Options,
    Text,
    find_measurement,
    read_options,
)

ROOT = Path(__file__).resolve().parents[3]


class Some(Options):
    count: Count = Field(default=4, description="how many")
    rate: FiniteFloat = Field(default=0.5, description="how fast")
    folder: Text = Field(default="", description="where")
    length: Count | None = Field(default=None, description="how long")
    shots: Counts = Field(default=(16, 64), description="how many each")
    body: dict[str, Any] = Field(default={}, description="what else")


@pytest.mark.parametrize(
    ("name", "value"),
    [("count", 7), ("rate", 2), ("folder", None), ("length", None), ("shots", [1]), ("body", {"seed": 1})],
)
def test_values_of_the_kind_are_taken(name: str, value: Any) -> None:
    options = read_options(Some, {name: value}, "It")
    taken = tuple(value) if isinstance(value, list) else "" if name == "folder" and value is None else value
    assert options == Some(**{name: taken})


WHOLE = "it should be a valid integer"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", "x", f"It cannot take 'x' for count (how many): {WHOLE}."),
        ("count", True, f"It cannot take True for count (how many): {WHOLE}."),
        ("count", 0, "It cannot take 0 for count (how many): it should be greater than or equal to 1."),
        ("count", None, f"It cannot take nothing for count (how many): {WHOLE}."),
        ("rate", float("nan"), "It cannot take nan for rate (how fast): it should be a finite number."),
        (
            "folder",
            2024,
            "It cannot take 2024 for folder (where): it should be a valid string; in quotation marks a number is text.",
        ),
        ("shots", 16, "It cannot take 16 for shots (how many each): it should be a list such as [16, 64]."),
        (
            "shots",
            [],
            "It cannot take [] for shots (how many each): Tuple should have at least 1 item after validation, not 0.",
        ),
        ("shots", [16, "x"], f"It cannot take [16, 'x'] for shots (how many each): {WHOLE}."),
        ("body", "x", "It cannot take 'x' for body (what else): it should be an object."),
        ("counts", 1, "It has no option 'counts'; did you mean 'count'?"),
    ],
)
def test_others_are_one_sentence(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_options(Some, {name: value}, "It")


def test_an_option_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"^'recall' has no option 'a'; it has none\.$"):
        read_options(Options, {"a": 1}, "'recall'")


def of_no_kind(kind: type[Options]) -> None:
    """Each option is described, takes its own default, and is refused what is of no kind."""
    assert read_options(kind, kind().model_dump(), "It") == kind()
    for name, field in kind.model_fields.items():
        assert field.description
        if not name.startswith("judge") and field.annotation is not str:
            with pytest.raises(ValueError, match=rf"^It cannot take .* for {name} \("):
                read_options(kind, {name: {1, 2}}, "It")


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_every_measurement_is_described_and_so_are_its_options(name: str) -> None:
    measurement = find_measurement(name)
    assert issubclass(measurement, Measurement)
    assert measurement.__doc__
    of_no_kind(measurement)


def test_docs_experiments_has_every_measurement_with_a_star_on_those_of_any_model() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    table = page.split("| measurement | experiment | measured on |")[1].split("\n\n")[0]
    named = dict(re.findall(r"`(\w+)`(\*?)", "".join(row.split("|")[1] for row in table.splitlines()[2:])))
    found = {name: find_measurement(name) for name in MEASUREMENTS}
    assert named == {name: "*" * one.any_model for name, one in found.items() if one.needs != "training"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiments_options_are_of_their_kind(name: str) -> None:
    experiment = find_experiment(name)
    of_no_kind(experiment.options)
    for preset in experiment.presets.values():
        read_options(experiment.options, preset.options, "It")
        for requested in experiment.requests(preset):
            requested.resolve()


def test_options_of_an_earlier_version_do_not_matter_where_there_are_no_baselines() -> None:
    """A results file holds the options it was made with; a report of it asks for chance and floor alone."""
    request = MeasurementRequest(name="outliers", options={"an_option_that_is_gone": 1})
    assert request.baselines(None) == []
    with pytest.raises(ValueError, match="an_option_that_is_gone"):
        request.resolve()
