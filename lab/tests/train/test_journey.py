"""How far a reader has to go from `train(recipe)` to the optimizer's step: the files of ours that a run enters."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import diff_lab
import diff_transformer
from diff_lab.train import train
from small_runs import small_recipe

HOUSES = [Path(house.__file__).parent for house in (diff_transformer, diff_lab)]


class _Arrived(Exception):  # noqa: N818  # no error: the journey ends here
    pass


def test_from_a_recipe_to_the_optimizers_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        house = next((house for house in HOUSES if path.is_relative_to(house)), None)
        if event == "call" and house is not None and frame.f_code.co_name != "<module>":  # what is only imported
            name = f"{house.name}/{path.relative_to(house).as_posix()}"
            entered.extend([name] if name not in entered else [])

    def arrive(*_: Any) -> None:
        raise _Arrived

    monkeypatch.setattr(torch.optim.AdamW, "step", arrive)
    recipe = small_recipe()
    sys.setprofile(profile)
    try:
        with pytest.raises(_Arrived):
            train(recipe, tmp_path / "run")
    finally:
        sys.setprofile(None)
    assert entered[0] == "diff_lab/train/loop.py"
    of_lab = [name for name in entered if name.startswith("diff_lab/")]
    assert len(of_lab) <= 15, of_lab
    assert len(entered) <= 38, entered  # the others make the model and its forward pass
