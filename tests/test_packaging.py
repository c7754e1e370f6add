"""What hatchling puts into wheels and source distributions, and what these do in an environment of their own."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from diff_transformer import shipped_models
from diff_transformer._version import __version__

sdist = pytest.importorskip("hatchling.builders.sdist")
wheel = pytest.importorskip("hatchling.builders.wheel")

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = "src/diff_transformer/weights"
# The files of a model, as lab/benchmarks/pack_weights.py writes them.
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


@pytest.mark.parametrize(
    ("root", "package"), [(ROOT, "diff_transformer"), (ROOT / "lab", "diff_lab")], ids=["library", "laboratory"]
)
def test_a_wheel_has_all_that_its_package_reads(root: Path, package: str) -> None:
    paths = included(wheel.WheelBuilder, root)
    read = {file.relative_to(root / "src").as_posix() for file in (root / "src").rglob("*") if file.is_file()}
    assert {path for path in read if "__pycache__" not in path} <= paths
    assert {path.partition("/")[0] for path in paths} == {package}


def test_the_wheels_have_models_the_explorers_bundle_and_recipes() -> None:
    paths = included(wheel.WheelBuilder, ROOT)
    model_files = {path for path in paths if path.startswith("diff_transformer/weights/")}
    assert len(model_files) == sum(file.is_file() for file in shipped_models.WEIGHTS.rglob("*"))
    bundle = {"explorer.js", "explorer.css", "LICENSES.txt"}
    assert {f"diff_transformer/explorer/bundle/{name}" for name in bundle} <= paths
    recipes = {f"diff_lab/recipes/{file.name}" for file in (ROOT / "lab" / "recipes").iterdir()}
    assert recipes
    assert recipes <= included(wheel.WheelBuilder, ROOT / "lab")
    sources = included(sdist.SdistBuilder, ROOT)
    assert {"web/build.mjs", "web/src/main.js", "lab/pyproject.toml", "lab/tests/test_files.py"} <= sources
    assert not [path for path in sources if "node_modules" in path]


def test_both_distributions_have_one_version() -> None:
    text = (ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{__version__}"\n' in text
    assert f'"diff-transformer=={__version__}"' in text


class FreshEnvironment:
    """An environment with the packages of this one, but for ours: of ours it has the wheels that are installed."""

    def __init__(self, folder: Path, *wheels: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        self.programs = folder / "venv" / "bin"
        packages = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        others = folder / "others"
        others.mkdir()
        for path in (path for installed in site.getsitepackages() for path in Path(installed).iterdir()):
            if not path.name.startswith(("diff_transformer", "diff_lab", "_editable", "__pycache__")):
                (others / path.name).symlink_to(path)
        (packages / "others.pth").write_text(str(others), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--python", str(self.programs / "python"), "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--no-index", *map(str, wheels)], check=True)
        self.folder = folder

    def run(self, *command: str) -> str:
        """Run a program of the environment outside of the checkout; returns its stdout."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.programs / command[0]), *command[1:]],
            cwd=self.folder,
            env=variables,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


IMPORT_ALL = """
import importlib, pkgutil, sys
import {package}
names = [module.name for module in pkgutil.walk_packages({package}.__path__, "{package}.")]
for name in names:
    if not name.endswith(("__main__", ".vllm_model", "diff_transformer.train")):  # vLLM is not there
        importlib.import_module(name)
print(len(names), "diff_lab" in sys.modules, {package}.__file__)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those of the library and of the laboratory."""
    folder = tmp_path_factory.mktemp("wheels")
    return [Path(next(wheel.WheelBuilder(str(root)).build(directory=str(folder)))) for root in (ROOT, ROOT / "lab")]


@pytest.mark.slow
def test_the_library_alone(wheels: list[Path], tmp_path: Path) -> None:
    """Every module is imported, and the commands run, where the laboratory is not installed."""
    environment = FreshEnvironment(tmp_path, wheels[0])
    count, has_laboratory, file = environment.run("python", "-c", IMPORT_ALL.format(package="diff_transformer")).split()
    assert int(count) > 50
    assert has_laboratory == "False"
    assert file.startswith(str(tmp_path))
    assert "diff-transformer-lab not installed" in " ".join(environment.run("diff-transformer", "info").split())
    options = ["--prompt", "It was", "--max-new-tokens", "3"]
    assert environment.run("diff-transformer", "generate", *options)
    assert "model.safetensors" in environment.run("diff-transformer", "export", "needles-diff", "shared")
    assert "How it was trained is not recorded" in (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
    environment.run("diff-transformer", "explore", "--output", "page.html")
    assert "Needles" in (tmp_path / "page.html").read_text(encoding="utf-8")
    environment.run("diff-transformer", "convert", "shared", "llama", "--to", "microsoft")
    assert "--continuous-batching" in environment.run("diff-transformer", "serve", "--help")


@pytest.mark.all
@pytest.mark.slow
def test_both_together(wheels: list[Path], tmp_path: Path) -> None:
    """A recipe of the laboratory's wheel is trained, and its card says how."""
    environment = FreshEnvironment(tmp_path, *wheels)
    code = IMPORT_ALL.format(package="diff_lab")
    _, has_laboratory, file = environment.run("python", "-c", code).split()
    assert has_laboratory == "True"
    assert file.startswith(str(tmp_path))
    settings = ["train.steps=1", "train.warmup_steps=0", "data.batch_size=2", "data.validation_sequences=4"]
    environment.run("diff-lab", "train", "retrieval", *settings, "--output", "run")
    environment.run("diff-transformer", "export", "run", "shared")
    assert "| steps | 1 |" in (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("builder", "prefix"), [(wheel.WheelBuilder, ""), (sdist.SdistBuilder, "src/")], ids=["wheel", "sdist"]
)
def test_every_file_of_a_model_is_packaged(builder: type, prefix: str, tmp_path: Path) -> None:
    """Whatever .gitignore leaves out."""
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / WEIGHTS / "novels-diff"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("", encoding="utf-8")
    assert {f"{prefix}diff_transformer/weights/novels-diff/{name}" for name in FILES} <= included(builder, tmp_path)
