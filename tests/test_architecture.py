"""Data flows one way: a lower room never imports a higher one (docs/design.md)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "diff_transformer"

# What each room may import of ours, besides itself. `results` is the record that rooms hand on to each other.
MAY_IMPORT = {
    "files": set(),
    "ops": set(),
    "nn": {"ops"},
    "model": {"ops", "nn"},
    "convert": {"nn", "model"},
    "text_workers": set(),  # one module, outside of `data` for what it does not import
    "data": {"text_workers"},
    "train": {"ops", "nn", "model", "data"},
    "eval": {"ops", "nn", "model", "data", "results"},
    "experiments": {"ops", "nn", "model", "bench", "data", "train", "eval", "results"},
    "bench": {"ops", "model", "results"},
    "report": {"results"},
    "results": set(),
    "cli": {"ops", "nn", "model", "convert", "data", "train", "eval", "experiments", "bench", "report", "results"},
}
# Which every room may import, and which imports nothing of ours.
COMMON = {"__version__", "CHECKOUT", "INSTALL", "files"}
# The package itself imports nothing but the hook that registers the model with transformers.
ROOT = {"__init__", "_registration", "__main__"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "diff_transformer" and len(parts) > 1:
                yield parts[1], node.lineno


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in modules()} <= MAY_IMPORT.keys() | ROOT


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_lower_room_never_imports_a_higher_one(path: Path) -> None:
    room = room_of(path)
    if room in ROOT:
        return
    # A program that is started by the name of its room is a door of the command line.
    inside = "cli" if path.stem == "__main__" else room
    allowed = MAY_IMPORT[inside] | {inside} | COMMON
    wrong = [f"{path}:{line} imports {name}" for name, line in imported_rooms(path) if name not in allowed]
    assert not wrong


BACKENDS = ("reference", "blockwise", "sdpa", "flex", "cpu", "triton")


def test_backends_do_not_import_each_other() -> None:
    """Nor what chooses among them; and what they share knows none of them."""
    for path in (PACKAGE / "ops").rglob("*.py"):
        name = path.relative_to(PACKAGE / "ops").with_suffix("").parts[0]
        if name not in (*BACKENDS, "visibility", "gradients", "norm"):
            continue
        imported = {
            node.module.split(".")[2]
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diff_transformer.ops.")
        }
        assert not imported & ({*BACKENDS, "attention", "backends"} - {name}), path


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import diff_transformer", ["torch", "transformers", "numpy"]),
        (
            "import diff_transformer.ops",
            ["transformers", "pydantic", "typer", "torch.utils.cpp_extension", "setuptools"],
        ),
        ("import diff_transformer.nn", ["transformers", "pydantic", "typer"]),
        ("import diff_transformer.results", ["torch", "transformers"]),
        ("import diff_transformer.model", ["datasets", "pydantic", "typer", "matplotlib", "tensorboard"]),
    ],
)
def test_a_room_loads_only_what_it_needs(statement: str, absent: list[str]) -> None:
    code = f"import sys; {statement}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
