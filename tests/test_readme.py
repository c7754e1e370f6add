"""The README's code runs, and what it says of files and commands is true."""

import importlib.util
import re
from pathlib import Path

import pytest

from diff_transformer.bench.tables import page
from diff_transformer.results import read_json

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_code_blocks() -> None:
    assert len(BLOCKS) >= 3


def test_the_setup_commands_come_first() -> None:
    first_screen = README.split("```python")[0]
    assert "make demo" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_commands_are_all_there() -> None:
    from diff_transformer.cli.app import COMMANDS

    assert set(re.findall(r"^    diff-transformer (\w+)", README, flags=re.MULTILINE)) == set(COMMANDS)


def test_named_recipes_are_shipped() -> None:
    from diff_transformer.train import shipped_recipes

    listed = re.search(r"a shipped one: ([\w, ]+)\n", README)
    assert listed is not None
    assert set(listed.group(1).split(", ")) == set(shipped_recipes())


def test_numbers_are_those_that_were_measured() -> None:
    spec = importlib.util.spec_from_file_location("fill_readme", ROOT / "benchmarks" / "fill_readme.py")
    assert spec is not None
    assert spec.loader is not None
    filler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(filler)
    demo, operator, model = read_json(filler.DEMO), read_json(filler.OPERATOR), read_json(filler.MODEL)
    assert filler.demo_table(demo["results"]) in README
    assert filler.speed_table(operator, **filler.SELECTION) in README
    assert filler.whole_model_table(model) in README
    backends = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for name, part in filler.backends_parts(operator).items():
        assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in backends
    # The pages beside the files are made by the same program from the same numbers.
    for path, document in ((filler.OPERATOR, operator), (filler.MODEL, model)):
        assert path.with_suffix(".md").read_text(encoding="utf-8") == page(document)
