"""Tables 1, 4 and 8 and Appendix C from training to comparison, at the tiniest size; no verdict on any of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corpora import written
from diff_lab.coordinates import Coordinates
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.request import ExperimentRequest, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.measure.hallucination import JudgeError
from diff_lab.record import Result, ResultsFile
from judge_server import JudgeServer, Reply, fails, judge_server, says

TINY = (
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.head_dim=8",
    "train.steps=2",
    "train.warmup_steps=0",
    "train.inspect_every=null",
)
TEXT = (
    *TINY,
    "model.tie_word_embeddings=false",  # weights that tell much apart: the model writes letters, not blanks alone
    "model.initializer_range=0.4",
    "data.tokenizer=bytes",
    "data.vocab_size=null",
    "data.length=128",
    "data.batch_size=2",
    "data.validation_tokens=4096",
    "train.evaluate_every=null",
)


def tiny(name: str, text: Path, **options: Any) -> ExperimentRequest:
    """The cpu preset made small: the same variants, two seeds, no trials."""
    experiment = find_experiment(name)
    paths = [] if name == "appendix_c" else [text]
    request = request_experiment(experiment, "cpu", seeds=2, text=paths, options=options)
    overrides = (*request.preset.overrides, *((*TINY, "data.validation_problems=32") if name == "appendix_c" else TEXT))
    return replace(request, preset=replace(request.preset, overrides=overrides, learning_rates=(1e-3,), sweep=()))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    sheep = [" ".join(f"{number * step} sheep jump over the fence." for step in range(9)) for number in range(80)]
    written(sheep, folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: those that train the same find each other's runs."""
    return tmp_path_factory.mktemp("output")


def no_verdict(results: ResultsFile, names: Sequence[str]) -> None:
    assert {comparison.name for comparison in results.comparisons} == set(names)
    for comparison in results.comparisons:
        assert (comparison.variant, comparison.against) == ("diff", "softmax")
        assert comparison.verdict is None
        assert len(comparison.differences) == 2
    assert any(note.startswith("No verdict: ") for note in results.notes)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("table4", {"judge": "nobody"}, "nobody"),
        ("table4", {"sources": "nowhere.jsonl"}, r"nowhere\.jsonl"),
        ("table1", {"tasks": "nowhere.jsonl"}, r"nowhere\.jsonl"),
        ("table8", {"tasks": "nowhere.jsonl"}, r"nowhere\.jsonl"),
    ],
)
def test_what_cannot_be_had_is_said_before_anything_is_trained(
    name: str, option: dict[str, str], message: str, text: Path, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_experiment(tiny(name, text, **option), tmp_path / "output")
    assert not (tmp_path / "output").exists()


@pytest.mark.all
def test_table_4_with_a_judge_behind_an_address(
    text: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops in the middle; the same command resumes and asks for nothing that it has an answer to."""
    monkeypatch.setenv("JUDGE_KEY", "sk-hidden-from-all")
    documents = [{"document": f"{number} sheep.", "question": "How many?"} for number in range(6)]
    (tmp_path / "qasper.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
    prompts: list[str] = []

    def rule(request: dict[str, Any]) -> Reply:
        prompts.append(request["messages"][1]["content"])
        if len(prompts) == 4:
            return fails(401, "no more money")
        return says(f"VERDICT: {'UN' if '3 sheep' in prompts[-1] else ''}SUPPORTED", prompt_tokens=50)

    def run(server: JudgeServer) -> ResultsFile:
        options = {"judge": server.url, "judge_model": "stub", "judge_key": "JUDGE_KEY"}
        sizes = {"documents": 6, "new_tokens": 12, "characters": 40}
        request = tiny("table4", text, sources=str(tmp_path / "qasper.jsonl"), **options, **sizes)
        return run_experiment(request, output, resume=True)

    (output / "table4.json").unlink(missing_ok=True)  # of another test, which asked for something else
    with judge_server() as server:
        server.rule = rule
        with pytest.raises(JudgeError, match=r"failed: .*401.*no more money"):
            run(server)
        results = run(server)
    # Only the one that was refused came again, and all of a run were asked for once.
    assert len(prompts) > 6
    assert set(prompts[:3]).isdisjoint(prompts[3:6])
    assert prompts[4] == prompts[3]
    no_verdict(results, ["hallucination/qasper"])
    (comparison,) = results.comparisons
    assert comparison.paper == (0.39, 0.28)
    for path in output.rglob("*.json*"):
        assert "sk-hidden" not in path.read_text(encoding="utf-8")


def test_the_paper_s_tasks_stand_beside_the_paper_s_values() -> None:
    names = {"harness/boolq/acc": 0.5, "harness/table1/average": 0.6, "harness/mine/acc": 0.7}
    records = [
        Result(
            name=name, variant=variant, value=value, seed=seed, coordinates=Coordinates(examples=shots), better="higher"
        )
        for name, value in names.items()
        for variant in ("diff", "softmax")
        for seed in (0, 1)
        for shots in (0, 5)
    ]
    values = {}
    for experiment in map(find_experiment, ("table1", "table8")):
        for comparison in experiment.compare(records, experiment.presets["cpu"]):
            values[experiment.name, comparison.name, comparison.coordinates.label] = comparison.paper
    assert values["table8", "harness/boolq/acc", "0-shot"] == (0.601, 0.629)
    assert values["table8", "harness/boolq/acc", "5-shot"] is None
    assert values["table8", "harness/table1/average", "5-shot"] == (0.58, 0.564)
    assert values["table8", "harness/mine/acc", "0-shot"] is None
    for name, value in {"harness/boolq/acc": 0.69, "harness/table1/average": 0.606}.items():
        ours, theirs = values["table1", name, "0-shot"] or (0, 0)
        assert ours == value
        assert math.isnan(theirs)  # the paper trained no Transformer alike
