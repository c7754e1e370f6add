"""How far a reader has to go from an experiment to its report."""

from pathlib import Path

import pytest

from diff_lab.experiments.request import as_defined, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.report.pages import build_results_report
from journeys import files_entered
from small_experiment import SMALL


@pytest.mark.all
def test_from_an_experiment_to_its_report(tmp_path: Path) -> None:
    """Data, the building of a model, its training, and what it computes are journeys of their own."""

    def journey() -> None:
        run_experiment(request_experiment(SMALL), tmp_path)
        build_results_report([tmp_path / "recall.json"], complete=as_defined)

    others = ("build_config", "build_data", "build_model", "meta_model", "train", "load_trained", "forward")
    files = files_entered(journey, but_for=others)
    assert len(files) <= 40, files
    assert (tmp_path / "RESULTS.md").is_file()
