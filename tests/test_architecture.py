"""Data flows one way: a lower package never imports a higher one, and no files import each other in a circle."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSES = {"diff_transformer": ROOT / "src" / "diff_transformer", "diff_lab": ROOT / "lab" / "src" / "diff_lab"}

# What each package (or file beside the packages) of the library may import of ours, besides itself and EVERYWHERE.
EVERYWHERE = {"_version", "attention_types", "utils"}
OPERATOR_TO_MODEL = {"ops", "nn", "model"}
LIBRARY: dict[str, set[str]] = {
    "_version": set(),
    "attention_types": set(),  # reports and the command line read it, so it loads nothing heavy
    "utils": set(),
    "_registration": set(),  # what it names it imports when transformers does
    "shipped_models": set(),
    "ops": set(),
    "nn": {"ops"},
    "model": {"ops", "nn"},
    "parallel": OPERATOR_TO_MODEL,
    "convert": {"nn", "model"},
    "explorer": {*OPERATOR_TO_MODEL, "convert"},
    "vllm_plugin": {"model"},
    "vllm_model": set(),  # vLLM imports it by its name
    "serve": set(),  # what it is given is a model of transformers
    "cli": {"shipped_models", *OPERATOR_TO_MODEL, "convert", "explorer", "serve"},
}
# The same of the laboratory, which besides may import all of the library but its command line.
RECORDS = {"coordinates", "record", "results_files", "statistics", "learning"}
LABORATORY: dict[str, set[str]] = {
    "files": set(),  # everybody's
    "coordinates": set(),
    "record": {"coordinates"},
    "results_files": {"coordinates", "record"},
    "statistics": {"coordinates", "record"},
    "learning": {"coordinates", "record", "statistics"},
    "data": set(),
    "train": {"data"},
    "titan": {"data", "train"},
    "measure": {"data", *RECORDS},
    "bench": {"record", "results_files", "statistics"},
    "experiments": {"data", "train", "measure", "bench", *RECORDS},
    # A report reads results files and nothing else: a figure can be drawn again without a model.
    "report": RECORDS,
}
LABORATORY["cli"] = {*LABORATORY}
# The package itself imports the hook that registers the model with transformers; the rest is for type checkers.
FOR_TYPES_ALONE = {"diff_transformer"}


def module_name(house: str, path: Path) -> str:
    parts = (house, *path.relative_to(HOUSES[house]).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(house, path): path for house, root in HOUSES.items() for path in sorted(root.rglob("*.py"))}


def imported_by(path: Path) -> set[str]:
    """The modules of ours that a file imports, wherever in it."""
    imports = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                imports.add(inside if inside in MODULES else str(node.module))
    return imports & MODULES.keys()


@pytest.fixture(scope="module")
def imports_by_module() -> dict[str, set[str]]:
    return {name: imported_by(path) for name, path in MODULES.items()}


def package_of(module: str) -> str:
    """The entry of `LIBRARY` or `LABORATORY` that a module belongs to."""
    return module.split(".")[1]


@pytest.mark.parametrize("module", sorted(MODULES.keys() - HOUSES.keys()))
def test_a_lower_package_never_imports_a_higher_one(module: str, imports_by_module: dict[str, set[str]]) -> None:
    # A program that is started by the name of its package is a door of the command line.
    package = "cli" if module.endswith(".__main__") else package_of(module)
    imports = {name for name in imports_by_module[module] if name not in HOUSES}
    ours = {name for name in imports if name.startswith(module.partition(".")[0])}
    if module.startswith("diff_transformer."):
        assert ours == imports, "the library imports the laboratory"
        allowed = LIBRARY[package] | EVERYWHERE | {package}
    else:
        assert package == "cli" or "cli" not in {package_of(name) for name in imports - ours}
        allowed = LABORATORY[package] | {"files", package}
    wrong = {name for name in ours if package_of(name) not in allowed}
    assert not wrong, f"{module} imports {wrong}"


def test_no_files_import_each_other_in_a_circle(imports_by_module: dict[str, set[str]]) -> None:
    graph = {name: imports - {name} for name, imports in imports_by_module.items() if name not in FOR_TYPES_ALONE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


# Files and lines of Python at most. A bound rises where somebody decides that what is new is worth it.
BOUNDS = {"diff_transformer": (87, 15_560), "diff_lab": (85, 15_150)}


@pytest.mark.parametrize("house", BOUNDS)
def test_a_house_grows_by_decision_alone(house: str) -> None:
    files = [path for name, path in MODULES.items() if name.partition(".")[0] == house]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert len(files) <= BOUNDS[house][0]
    assert lines <= BOUNDS[house][1]


# Words in whose place a docstring names the thing or the condition, at most so many in 10,000 words.
VAGUE, MOST_VAGUE = {"what", "where"}, 50


@pytest.mark.parametrize("house", HOUSES)
def test_docstrings_name_things_and_conditions(house: str) -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    words: list[str] = []
    for name, path in MODULES.items():
        if name.partition(".")[0] == house:
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            docstrings = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented))
            words += (word for text in docstrings for word in re.findall(r"[^\W\d_]+", text.lower()))
    assert 10_000 * sum(word in VAGUE for word in words) <= MOST_VAGUE * len(words)


def test_backends_do_not_import_each_other(imports_by_module: dict[str, set[str]]) -> None:
    """Nor what chooses among them; and what they share knows none of them."""
    backends = {"reference", "blockwise", "sdpa", "flex", "flash", "cpu", "triton"}
    for module, imports in imports_by_module.items():
        if not module.startswith("diff_transformer.ops."):
            continue
        name = module.split(".")[2]
        if module.endswith(".triton.gpu_check"):  # compares the kernels, and FlashAttention-4's, with Equation 1
            imports = imports - {"diff_transformer.ops.reference", "diff_transformer.ops.flash"}
        if name in backends | {"attention_request", "functional"}:
            others = backends | {"operator", "backends"}
            assert not {path.split(".")[2] for path in imports if path.count(".") > 1} & (others - {name}), module


# What is imported in one process, one after another, and what must not be loaded by then.
LOADED_IN_TURN = {
    "the library": [
        ("import diff_transformer; diff_transformer.pretrained_names()", ["torch", "transformers", "numpy"]),
        ("import diff_transformer.attention_types", ["torch", "transformers", "numpy"]),
        (
            "import diff_transformer.ops",
            ["transformers", "pydantic", "typer", "torch.utils.cpp_extension", "torch._dynamo", "setuptools"],
        ),
        ("from diff_transformer.nn import *", ["transformers", "accelerate", "pydantic", "typer"]),
        ("import diff_transformer.model", ["datasets", "pydantic", "typer", "matplotlib", "tensorboard"]),
        ("import diff_transformer.convert", ["datasets", "pydantic", "rich", "typer"]),
        ("import diff_transformer.explorer", ["datasets", "pydantic", "typer", "starlette", "uvicorn", "anywidget"]),
    ],
    "results": [("import diff_lab.results_files, diff_lab.statistics", ["torch", "transformers"])],
}


@pytest.mark.parametrize("imports", LOADED_IN_TURN.values(), ids=LOADED_IN_TURN)
def test_a_package_loads_only_what_it_needs(imports: list[tuple[str, list[str]]]) -> None:
    lines = ["import sys"]
    for statement, absent in imports:
        lines += [statement, f"print([name for name in {absent!r} if name in sys.modules])"]
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["[]"] * len(imports)


# The most files on each journey of docs/design.md, in the order of that page.
LONGEST_JOURNEYS = [5, 8, 8, 8, 12, 8, 8]


def test_the_journeys_of_the_design_page_exist_and_are_short() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.split("## Journeys through the code")[1].split("\n## ")[0]
    journeys = [
        re.findall(r"^\d+\. `([^`]+)`", part, flags=re.MULTILINE) for part in re.split(r"\n\nFrom ", section)[1:]
    ]
    assert all(len(files) <= most for files, most in zip(journeys, LONGEST_JOURNEYS, strict=True))
    assert all(any((house / file).is_file() for house in HOUSES.values()) for files in journeys for file in files)


@pytest.mark.parametrize("package", ["ops", "nn"])
def test_ops_and_nn_import_torch_and_triton_alone(package: str) -> None:
    """Inside functions, too, which a test of a running process may not reach."""
    # The last where it is installed.
    allowed = sys.stdlib_module_names | {"torch", "triton", "diff_transformer", "flash_attn"}
    for file in (HOUSES["diff_transformer"] / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed, f"{file}: {names}"
