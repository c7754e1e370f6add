"""Checkpoints: complete or passed over, whatever happened while one was written."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diff_lab.train.checkpoint import Checkpoints, RunState, collective_directory, load_checkpoint, save_model
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.utils.manifest import why_incomplete
from tiny_model import SIZES

FILES = (
    "complete.json",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "state.json",
)
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda content: None,
    "empty": lambda content: b"",
    "one byte short": lambda content: content[:-1],
    "one byte long": lambda content: content + b" ",
    "garbage": lambda content: b"\xf7" * len(content),
    "flipped bit": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "zeros": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
}


@pytest.fixture(scope="module")
def model() -> DiffTransformerForCausalLM:
    return DiffTransformerForCausalLM(DiffTransformerConfig(**{**SIZES, "num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """After one step: with a state."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return [optimizer]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: Any, optimizers: Any) -> Path:
    """A folder with the checkpoints of steps 1 and 2; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        Checkpoints(folder, keep=2).save(RunState("x", step), model, optimizers, None)
    return folder


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two, tmp_path / "checkpoints")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_torn_checkpoint_is_passed_over_with_a_message(folder: Path, name: str, damage: str) -> None:
    file = folder / "step-000002" / name
    content = DAMAGES[damage](file.read_bytes())
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    messages: list[str] = []
    checkpoints = Checkpoints(folder, keep=1, tell=messages.append)
    if (name, damage) == ("complete.json", "one byte long"):  # a space after the JSON: nothing is lost
        assert checkpoints.newest() == folder / "step-000002"
        return
    assert checkpoints.newest() == checkpoints.last == folder / "step-000001"
    assert len(messages) == 1
    assert messages[0].startswith(f"The checkpoint {str(folder / 'step-000002')!r} cannot be used and is passed over: ")
    assert "\n" not in messages[0]
    if damage != "garbage":
        assert name in messages[0] or name == "complete.json"
    assert names(folder) == ["step-000001", "step-000002"]  # looking deletes nothing


def test_a_checkpoint_of_an_earlier_version_is_read(folder: Path, model: Any, optimizers: Any) -> None:
    detector: dict[str, Any] = {"losses": [3.0], "faults": 1, "overflows": 0}
    former = {"data": "x", "step": 2, "seconds": 1.5, "scaler": None, "watch": detector}
    (folder / "step-000002" / "state.json").write_text(json.dumps(former))
    for path in folder.iterdir():  # the manifest has sizes alone
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.name != "complete.json"}
        (path / "complete.json").write_text(json.dumps({"files": sizes}, indent=1))
    checkpoint = Checkpoints(folder, keep=1).newest()
    assert checkpoint == folder / "step-000002"
    assert load_checkpoint(checkpoint, model, optimizers) == RunState("x", 2, 1.5, detector)
    (checkpoint / "state.json").write_text("{")
    with pytest.warns(UserWarning, match="state.json has 1 bytes instead of"):
        assert Checkpoints(folder, keep=1).newest() == folder / "step-000001"


def test_none_that_can_be_used(folder: Path) -> None:
    (folder / "step-000001" / "state.json").write_text("")
    (folder / "step-000002" / "complete.json").unlink()
    message = r"No checkpoint in .*step-000002: it has no complete\.json.*; step-000001: state\.json has 0 bytes"
    with pytest.raises(OSError, match=message):
        Checkpoints(folder, keep=1).newest()


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing", keep=1).newest() is None
    (tmp_path / "step-old").mkdir()  # not ours
    (tmp_path / "step-000003").write_text("a file")
    assert Checkpoints(tmp_path, keep=1).newest() is None


def test_only_complete_checkpoints_count(folder: Path, model: Any, optimizers: Any) -> None:
    """What is damaged is deleted when a later one is complete, and takes nobody's place before.

    It is known from when it was passed over: its content is not read again for every checkpoint.
    """
    shutil.copytree(folder / "step-000002", folder / "step-000009")
    (folder / "step-000009" / "state.json").unlink()
    weights = folder / "step-000002" / "model.safetensors"
    weights.write_bytes(DAMAGES["zeros"](weights.read_bytes()) or b"")
    messages: list[str] = []
    checkpoints = Checkpoints(folder, keep=2, tell=messages.append)
    assert checkpoints.newest() == folder / "step-000001"
    assert ["step-000009" in messages[0], "step-000002" in messages[1], len(messages)] == [True, True, 2]
    assert checkpoints.save(RunState("x", 3), model, optimizers, None) == checkpoints.last == folder / "step-000003"
    assert names(folder) == ["step-000001", "step-000003", "step-000009"]
    checkpoints.save(RunState("x", 9), model, optimizers, None)
    assert names(folder) == ["step-000003", "step-000009"]
    assert len(messages) == 2
    assert Checkpoints(folder, keep=2).newest() == folder / "step-000009"


def test_what_is_restored(two: Path, model: Any, optimizers: Any) -> None:
    torch.manual_seed(3)
    loaded = DiffTransformerForCausalLM(model.config)
    fresh = torch.optim.AdamW(loaded.parameters())
    assert load_checkpoint(two / "step-000002", loaded, [fresh]) == RunState("x", 2)
    for mine, saved in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, saved)
        restored, expected = fresh.state[mine], optimizers[0].state[saved]
        assert restored.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(restored[key], expected[key]) for key in expected)
    again = torch.rand(3)
    load_checkpoint(two / "step-000002", loaded, [fresh])
    assert torch.equal(torch.rand(3), again)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_folder_that_is_not_finished_leaves_the_one_before(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model"
    with collective_directory(target) as folder:
        (folder / "a").write_text("1")

    def fail() -> None:
        with collective_directory(target) as folder:
            (folder / "a").write_text("2")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == ["model"]
    assert (target / "a").read_text() == "1"
    with collective_directory(target) as folder:
        (folder / "b").write_text("3")
    assert names(tmp_path) == ["model"]
    assert names(target) == ["b"]


def test_all_is_on_the_disk_before_the_folder_is_moved(tmp_path: Path, model: Any, disk: Any) -> None:
    with collective_directory(tmp_path / "model") as folder:
        save_model(folder, model, None)
        (folder / "more").mkdir()
        (folder / "more" / "file").write_text("x")
    assert disk.moved == [tmp_path / "model"]
    assert tmp_path.stat().st_ino in disk.flushed  # the folder's new name as well


# Killed


class Killed(BaseException):
    """The process is no more: nothing that it does afterwards has an effect."""


class Killer:
    """Raises at the n-th operation on files, and at all that follow, as no clean-up happens in a process that is gone.

    Python announces each operation to an audit hook before it does it.
    """

    CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")

    def __init__(self) -> None:
        self.remaining: int | None = None  # operations until the end; None while nobody is to be killed

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and set("wxa+") & set(arguments[1])
        if self.remaining is not None and (event in self.CHANGES or writes):
            if self.remaining == 0:
                raise Killed
            self.remaining -= 1

    @contextmanager
    def after(self, operations: int) -> Iterator[None]:
        self.remaining = operations
        try:
            yield
        finally:
            self.remaining = None


@pytest.fixture(scope="module")
def killer() -> Killer:
    """One for all tests: an audit hook stays for good."""
    killer = Killer()
    sys.addaudithook(killer)
    return killer


@pytest.mark.parametrize("step", [3, pytest.param(2, marks=pytest.mark.all)])
def test_killed_at_any_operation(
    two: Path, tmp_path: Path, model: Any, optimizers: Any, killer: Killer, step: int
) -> None:
    """While step 3 is written and step 2 deleted, and while step 2 is written again: there always is a newest one."""
    is_finished, sources = False, []
    for operations in range(200):
        folder = shutil.copytree(two, tmp_path / str(operations))
        try:
            with killer.after(operations):
                Checkpoints(folder, keep=1).save(RunState("y", step), model, optimizers, None)
            is_finished = True
        except Killed:
            pass
        newest = Checkpoints(folder, keep=1).newest()  # a message would be a warning, and that an error
        assert newest is not None
        state = load_checkpoint(newest, model, optimizers)
        assert state in (RunState("x", 2), RunState("y", step))
        sources.append(state.data)
        if is_finished:
            break
        Checkpoints(folder, keep=1).save(RunState("z", 4), model, optimizers, None)
        assert names(folder) == ["step-000004"]
        assert why_incomplete(folder / "step-000004") is None
        shutil.rmtree(folder)
    assert is_finished
    assert sources == sorted(sources)  # the earlier one, and from some operation on the new one
    assert set(sources) == {"x", "y"}
    assert operations > 15


def test_killed_while_a_model_is_replaced(tmp_path: Path, killer: Killer) -> None:
    contents = []
    for operations in range(50):
        target = tmp_path / str(operations) / "model"
        with collective_directory(target) as folder:
            (folder / "a").write_text("1")
        try:
            with killer.after(operations), collective_directory(target) as folder:
                (folder / "a").write_text("2")
        except Killed:
            with pytest.raises(RuntimeError), collective_directory(target):  # the next attempt finds what was there
                raise RuntimeError from None
        else:
            break
        finally:
            contents.append((target / "a").read_text())
        assert names(target.parent) == ["model"]
    assert contents == sorted(contents)
    assert set(contents) == {"1", "2"}
