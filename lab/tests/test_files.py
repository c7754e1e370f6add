import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.files import read_metrics
from diff_lab.record import Comparison, Result, ResultsFile
from diff_lab.results_files import read_results, write_json

FIRST = {"variant": "diff", "value": 0.5, "interval": (0.4, 0.6), "n": 100, "better": "higher", "method": "Wilson"}
SECOND = {"variant": "softmax", "value": 1.0, "seed": 0, "better": "lower", "unit": "nats"}
ENVIRONMENT = {"command": "demo", "device": "cpu", "versions": {"python": "3"}, "commit": None, "created": "now"}
RESULTS = ResultsFile(
    title="t",
    settings={"steps": 3, "name": None},
    records=(
        Result(name="a/accuracy", **FIRST),
        Result(name="a/loss", coordinates=Coordinates(depth=(0.0, 0.25)), **SECOND),
    ),
    **ENVIRONMENT,
)


def test_results_survive_a_round_trip(tmp_path: Path) -> None:
    compared = Comparison(
        name="a/loss",
        variant="diff",
        against="softmax",
        ours=(1.0, 2.0),
        difference=-1.0,
        differences=(-1.5, -0.5),
        interval=(-2.0, 0.5),
        better="lower",
        paper=(3.062, math.nan),
        verdict="inconclusive",
        seeds_needed=7,
        documents_needed=True,
        exploratory=True,
    )
    record = replace(RESULTS.records[0], documents=((1.0, 2.0), (3.0, 4.0)))
    records = (record, *RESULTS.records)
    complete = replace(RESULTS, records=records, comparisons=(replace(compared, paper=None),), notes=("a note",))
    path = write_json(tmp_path / "results.json", complete)
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]
    assert read_results(path) == complete
    # A file from before comparisons.
    data = json.loads(path.read_text())
    assert ["documents" in one for one in data["records"]] == [True, False, False]
    path.write_text(json.dumps({key: value for key, value in data.items() if key not in ("comparisons", "notes")}))
    assert read_results(path) == replace(complete, comparisons=(), notes=())
    half_known = read_results(write_json(tmp_path / "half.json", replace(complete, comparisons=(compared,))))
    paper = half_known.comparisons[0].paper
    assert paper is not None
    assert paper[0] == 3.062
    assert math.isnan(paper[1])


def test_what_is_not_finite_is_strict_json_and_comes_back(tmp_path: Path) -> None:
    diverged = replace(RESULTS.records[0], value=math.nan, interval=(math.nan, math.inf))
    path = write_json(tmp_path / "results.json", replace(RESULTS, records=(diverged,)))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = read_results(path).records[0]
    assert math.isnan(back.value)
    assert back.interval is not None
    assert math.isnan(back.interval[1])


def test_tensors_and_paths_are_written_plainly(tmp_path: Path) -> None:
    import torch

    content = {"map": torch.eye(2), "path": Path("a"), "flag": True, "inf": torch.tensor(math.inf)}
    path = write_json(tmp_path / "x.json", content)
    assert json.loads(path.read_text()) == {"map": [[1.0, 0.0], [0.0, 1.0]], "path": "a", "flag": True, "inf": None}
    with pytest.raises(ValueError, match="not set"):
        write_json(tmp_path / "x.json", {"bad": {1}})
    assert json.loads(path.read_text())["flag"] is True


COMPARED = {"name": "a", "variant": "diff", "against": "softmax", "ours": [1, 2], "difference": -1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("device"), r"the file\.device is missing"),
        (lambda data: data["records"][0].update(vlaue=1), r"records\[0\]\.vlaue is an unknown key"),
        (lambda data: data.update(records={}), r"the file\.records .* array, got {}"),
        (lambda data: data["records"][0].update(value="high"), r"records\[0\]\.value .* number, got 'high'"),
        (lambda data: data["records"][0].update(value=True), r"records\[0\]\.value .* number, got True"),
        (lambda data: data.update(comparisons=[COMPARED | {"documents_needed": 1}]), "documents_needed .* boolean"),
        (lambda data: data["records"][0].update(n=1.0), r"records\[0\]\.n .* integer, got 1.0"),
        (lambda data: data["records"][0].update(better="more"), r"records\[0\]\.better .*'lower', got 'more'"),
        (lambda data: data["records"][0].update(interval=[1, 2, 3]), r"at most 2 items"),
    ],
)
def test_a_wrong_results_file_is_named_with_what_is_wrong(tmp_path: Path, change, message: str) -> None:
    path = write_json(tmp_path / "results.json", RESULTS)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(FileNotFoundError, match=r"results\.json does not exist"):
        read_results(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"results\.json is not JSON"):
        read_results(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"results\.json is not UTF-8"):
        read_results(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"results\.json: the file .* an object, got \[\]"):
        read_results(path)


def test_metrics_leave_out_the_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: expected an object with a whole number 'step'"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"loss\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(path)
