import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diff_transformer import results
from diff_transformer.results import (
    AttentionExample,
    Result,
    ResultsFile,
    Samples,
    capture_environment,
    capture_results,
    mean_interval,
    proportion_interval,
    read_attention,
    read_metrics,
    read_results,
    read_samples,
    write_json,
    write_text,
)


@pytest.fixture
def results_file() -> ResultsFile:
    records = (
        Result(name="a/accuracy", arm="diff", value=0.5, interval=(0.4, 0.6), n=100, better="higher", method="Wilson"),
        Result(name="a/loss", arm="softmax", value=1.0, seed=0, better="lower", group="0–25 %", unit="nats"),
    )
    environment = {"command": "demo", "device": "cpu", "versions": {"python": "3"}, "commit": None, "created": "now"}
    return ResultsFile(**environment, title="t", settings={"steps": 3, "name": None}, records=records)


# Wilson 1927 as tabulated by Newcombe (1998, Table I, method 3), to the four digits given there.
@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
        (29, 29, (0.8830, 1.0)),
    ],
)
def test_proportion_interval_is_wilsons(successes: int, n: int, interval: tuple[float, float]) -> None:
    assert proportion_interval(successes, n) == pytest.approx(interval, abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_proportion_interval_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"successes={successes}, n={n}"):
        proportion_interval(successes, n)


# The 0.975 quantiles of Student's t as every table has them, both sides of where the expansion takes over.
@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423), (120, 1.9799)],
)
def test_mean_interval_is_students(df: int, quantile: float) -> None:
    values = [float(value) for value in range(df + 1)]
    low, high = mean_interval(values) or (math.nan, math.nan)
    spread = math.sqrt(sum((value - df / 2) ** 2 for value in values) / df / (df + 1))
    assert (low + high) / 2 == pytest.approx(df / 2)
    assert (high - low) / 2 / spread == pytest.approx(quantile, abs=6e-5)


def test_t_quantile_is_continuous_where_the_formula_changes() -> None:
    exact = [results._t_quantile(df) for df in (198, 199, 200)]
    step = exact[1] - exact[2]
    assert results._t_quantile(201) == pytest.approx(exact[2] - step, abs=1e-6)


def test_mean_interval_of_one_value_of_none_and_of_a_diverged_run() -> None:
    assert mean_interval([3.0]) is None
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
    low, high = mean_interval([1.0, math.inf, 2.0]) or (0.0, 0.0)
    assert math.isnan(low)
    assert math.isnan(high)


def test_results_survive_a_round_trip(tmp_path: Path, results_file: ResultsFile) -> None:
    assert read_results(write_json(tmp_path / "results.json", results_file)) == results_file
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_attention_and_samples_survive_a_round_trip(tmp_path: Path) -> None:
    example = AttentionExample(
        tokens=("a", "b"),
        layers={"diff": 1},
        heads={"diff": 2},
        query_position=1,
        answer_positions=(0,),
        needle_positions=(0, 1),
        maps={"diff": {"A1": [[1.0, 0.0], [0.5, 0.5]]}},
        lambda_=0.2,
    )
    path = write_json(tmp_path / "attention.json", example, indent=None)
    assert json.loads(path.read_text())["lambda"] == 0.2
    assert read_attention(path) == example
    samples = Samples(prompt="def ", diff="λ\n", softmax="</b>")
    assert read_samples(write_json(tmp_path / "samples.json", samples)) == samples


def test_what_is_not_finite_is_strict_json_and_comes_back(tmp_path: Path, results_file: ResultsFile) -> None:
    diverged = replace(results_file.records[0], value=math.nan, interval=(math.nan, math.inf))
    path = write_json(tmp_path / "results.json", replace(results_file, records=(diverged,)))
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


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path / "x.txt", "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(results.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("device"), "the file lacks device"),
        (lambda data: data.update(devise="x"), "unknown key devise; allowed are command, commit"),
        (lambda data: data.update(records={}), "the file.records must be tuple, got {}"),
        (lambda data: data["records"].append(1), r"the file.records\[2\] must be an object, got 1"),
        (lambda data: data["records"][0].update(value="high"), r"records\[0\].value must be float, got 'high'"),
        (lambda data: data["records"][0].update(n=True), r"records\[0\].n must be int, got True"),
        (lambda data: data["records"][0].update(better="more"), r"records\[0\].better must be one of .*'lower'"),
        (lambda data: data["records"][0].update(interval=[1]), r"records\[0\].interval must hold 2 values, got 1"),
        (lambda data: data["records"][0].update(interval=[2, 1]), "the interval of a/accuracy must be"),
        (lambda data: data["records"][0].update(arm=""), "needs a name and an arm"),
        (lambda data: data["versions"].update(python=3), r"versions\['python'\] must be str, got 3"),
    ],
)
def test_a_wrong_results_file_is_named_with_what_is_wrong(
    tmp_path: Path, results_file: ResultsFile, change, message: str
) -> None:
    path = write_json(tmp_path / "results.json", results_file)
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
    with pytest.raises(ValueError, match=r"results\.json: the file must be an object"):
        read_results(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_position": 2}, r"positions must lie in 0 … 1, got \(2, 0\)"),
        ({"layers": {"diff": 1}}, "layers, heads and maps must be of the same arms"),
        (
            {"layers": {"a": 1}, "heads": {"a": 1}, "maps": {"a": {"A2": [[1.0]]}}},
            "the map A2 of a must have 2 rows of 2 weights",
        ),
    ],
)
def test_an_attention_file_whose_parts_disagree_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    good = {"tokens": ["a", "b"], "layers": {}, "heads": {}, "query_position": 1, "answer_positions": [0]}
    good |= {"needle_positions": [], "maps": {}, "lambda": 0.5}
    with pytest.raises(ValueError, match=message):
        read_attention(write_json(tmp_path / "attention.json", good | change))


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


def test_the_environment_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results.sys, "argv", ["/somewhere/bin/diff-transformer", "demo", "--text", "my notes.txt"])
    environment = capture_environment("cpu")
    assert environment.command == "diff-transformer demo --text 'my notes.txt'"
    assert "thread" in environment.device
    assert set(environment.versions) == {"python", "diff-transformer", "torch", "transformers"}
    assert environment.created.endswith("+00:00")
    monkeypatch.setattr(results.sys, "argv", ["benchmarks/ops.py", "-v"])
    assert results.command_line() == "ops.py -v"
    records = [Result(name="x", arm="diff", value=1.0)]
    captured = capture_results("title", {"steps": 1}, records, "cpu")
    assert captured.records == tuple(records)
    assert captured.command == "ops.py -v"


def test_the_commit_is_this_projects_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "results.py"
    module.write_text("")
    monkeypatch.setattr(results, "__file__", str(module))
    assert results._git_commit() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "somebody else's")
    assert results._git_commit() is None, "a file that their repository does not track is not theirs"
    git("add", "results.py")
    git("commit", "-qm", "ours")
    assert results._git_commit() == git("rev-parse", "HEAD")
    module.write_text("changed")
    assert results._git_commit() == git("rev-parse", "HEAD") + "-dirty"


def test_reading_results_does_not_import_torch() -> None:
    code = "import sys, diff_transformer.results; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
