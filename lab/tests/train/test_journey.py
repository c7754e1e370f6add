"""How far a reader has to go from `train(recipe)` to the optimizer's step."""

from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diff_lab.train import train
from journeys import files_entered
from small_runs import small_recipe


def test_from_a_recipe_to_the_optimizers_step(tmp_path: Path) -> None:
    class Arrived(Exception):  # noqa: N818  # no error: the journey ends here
        pass

    def arrive(*_: object) -> None:
        raise Arrived

    def journey() -> None:
        with register_optimizer_step_pre_hook(arrive), pytest.raises(Arrived):
            train(small_recipe(), tmp_path / "run")

    # How the CPU kernel is found and loaded is a journey of its own (tests/ops/test_journeys.py).
    files = files_entered(journey, since="train", but_for=("available_to_auto",))
    of_lab = [file for file in files if file.startswith("diff_lab/")]
    assert of_lab[0] == "diff_lab/train/loop.py"
    assert len(of_lab) <= 9, of_lab
    assert len(files) <= 25, files  # the others make the model and its forward pass
