"""How far a reader has to go from an experiment to its report: the files of ours that the journey enters."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import diff_lab
import diff_transformer
from diff_lab.experiments.request import as_defined, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.report.pages import build_results_report
from small_experiment import SMALL

HOUSES = [Path(house.__file__).parent for house in (diff_lab, diff_transformer)]


def files_entered(call: Callable[[], object], but_for: tuple[str, ...] = ()) -> list[str]:
    """Our Python files in which the call runs a function, in the order in which it does; what functions of the names
    `but_for` call in their turn is another journey.
    """
    entered: dict[str, str] = {}
    within: list[FrameType] = []  # the function of another journey that is running

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if within:
            if event == "return" and frame is within[0]:
                within.clear()
            return
        code = frame.f_code
        if event != "call" or not code.co_filename.endswith(".py") or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_filename not in entered:
            path = Path(code.co_filename)
            entered[code.co_filename] = next(
                (f"{house.name}/{path.relative_to(house)}" for house in HOUSES if path.is_relative_to(house)), ""
            )
        if entered[code.co_filename] and code.co_name in but_for:
            within.append(frame)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file in entered.values() if file]


def test_from_an_experiment_to_its_report(tmp_path: Path) -> None:
    """Data, the building of a model, its training, and what it computes are journeys of their own."""

    def journey() -> None:
        run_experiment(request_experiment(SMALL), tmp_path)
        build_results_report([tmp_path / "recall.json"], complete=as_defined)

    others = ("build_config", "build_data", "build_model", "meta_model", "train", "load_trained", "forward")
    files = files_entered(journey, but_for=others)
    assert len(files) <= 40, files
    assert (tmp_path / "RESULTS.md").is_file()
