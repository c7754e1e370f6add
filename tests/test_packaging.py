"""What hatchling would put into the wheel and the source distribution."""

import shutil
from pathlib import Path

import pytest

from diff_transformer import shipped_models

sdist = pytest.importorskip("hatchling.builders.sdist")
wheel = pytest.importorskip("hatchling.builders.wheel")

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "src/diff_transformer/weights"
# The files of a model, as benchmarks/pack_weights.py writes them.
FILES = (
    "README.md",
    "card.json",
    "config.json",
    "held_out.jsonl",
    "model.safetensors",
    "recipe.yaml",
    "tokenizer.json",
)


def included(builder: type, root: Path) -> set[str]:
    return {file.distribution_path for file in builder(str(root)).recurse_included_files()}


def test_the_wheel_has_all_that_the_package_reads() -> None:
    paths = included(wheel.WheelBuilder, ROOT)
    package = {file.relative_to(ROOT / "src").as_posix() for file in (ROOT / "src").rglob("*") if file.is_file()}
    assert {path for path in package if "__pycache__" not in path} <= paths
    model_files = {path for path in paths if path.startswith("diff_transformer/weights/")}
    assert len(model_files) == sum(file.is_file() for file in shipped_models.WEIGHTS.rglob("*"))
    bundle = {"explorer.js", "explorer.css", "LICENSES.txt"}
    assert {f"diff_transformer/explorer/bundle/{name}" for name in bundle} <= paths
    sources = included(sdist.SdistBuilder, ROOT)
    assert {"web/build.mjs", "web/src/main.js"} <= sources
    assert not [path for path in sources if "node_modules" in path]


@pytest.mark.parametrize(
    ("builder", "prefix"), [(wheel.WheelBuilder, ""), (sdist.SdistBuilder, "src/")], ids=["wheel", "sdist"]
)
def test_every_file_of_a_model_is_packaged(builder: type, prefix: str, tmp_path: Path) -> None:
    """Whatever .gitignore leaves out."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "recipes").mkdir()
    folder = tmp_path / WEIGHTS / "novels-diff"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("", encoding="utf-8")
    assert {f"{prefix}diff_transformer/weights/novels-diff/{name}" for name in FILES} <= included(builder, tmp_path)
