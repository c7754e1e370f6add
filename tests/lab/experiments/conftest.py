"""What tests of experiments share."""

import multiprocessing

import pytest

import forked
from diff_transformer.lab.experiments import side_by_side


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a machine with two cores, forked off a process that has imported everything, and not begun anew."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(forked.PRELOADED)
    monkeypatch.setattr(side_by_side, "START", "forkserver")
    monkeypatch.setattr(side_by_side, "cores", lambda: 2)  # so that each of two has one thread, as every test
