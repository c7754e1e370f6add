"""The README's code runs, and what it says of files and commands is true."""

import importlib.util
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest

from diff_transformer.lab.bench.bench_pages import page, replace_sections
from diff_transformer.storage.files import read_json

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_it_is_short() -> None:
    assert BLOCKS
    assert README.count("\n") < 150


def test_the_setup_commands_come_first() -> None:
    first_screen = README.split("```python")[0]
    assert "make demo" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.fixture(scope="module")
def filler() -> Any:
    spec = importlib.util.spec_from_file_location("fill_readme", ROOT / "benchmarks" / "fill_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_are_those_that_were_measured(filler: Any) -> None:
    operator, model = read_json(filler.OPERATOR), read_json(filler.MODEL)
    amx_operator, amx_model = read_json(filler.AMX_OPERATOR), read_json(filler.AMX_MODEL)
    experiments = filler.measured_experiments()
    parts = {"decided": filler.decided(experiments, "results/RESULTS.md")}
    parts |= {"costs": filler.costs([(operator, model), (amx_operator, amx_model)])}
    for name, part in parts.items():
        assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in README
    backends = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for name, part in filler.backends_parts(operator, amx_operator).items():
        assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in backends
    # The pages beside the files are made by the same program from the same numbers.
    made = {filler.OPERATOR: operator, filler.MODEL: model}
    made |= {filler.AMX_OPERATOR: amx_operator, filler.AMX_MODEL: amx_model}
    for path, document in made.items():
        assert path.with_suffix(".md").read_text(encoding="utf-8") == page(document)


def test_the_figure_shows_what_was_measured(filler: Any) -> None:
    shown = filler.figure_panels(filler.measured_experiments())
    drawn = filler.FIGURE.read_text(encoding="utf-8")
    for text in (text for panel in shown for row in panel.rows for text in (panel.title, row.label, row.remark)):
        assert escape(text, quote=False) in drawn
    names = {dot.variant for panel in shown for row in panel.rows for dot in row.dots}
    assert names >= {"diff", "softmax", "diff_v2"}


def test_numbers_of_a_gpu_are_those_that_were_measured(filler: Any) -> None:
    for path, parts in filler.measured_on_cuda().items():
        text = path.read_text(encoding="utf-8")
        for name, part in parts.items():
            assert f"<!-- {name} -->\n{part}\n<!-- /{name} -->" in text
    for path in (filler.CUDA_OPERATOR, filler.CUDA_MODEL):
        if path.is_file():
            assert path.with_suffix(".md").read_text(encoding="utf-8") == page(read_json(path))


def test_without_a_gpu_nothing_is_said_of_one(filler: Any) -> None:
    assert not any(filler.cuda_parts(None, None).values())


def test_numbers_of_a_gpu_are_filled_in(filler: Any, tmp_path: Path) -> None:
    def device(document: Any, against: str) -> Any:
        rows = [{**row, "against": against} if row["against"] == "softmax" else row for row in document["rows"]]
        rows += [
            {**row, "candidate": against} for row in rows if row["candidate"] == "softmax" and against != "softmax"
        ]
        notes = [f"noted of the {document['title']}"]
        return {**document, "rows": rows, "notes": notes, "device": "a GPU"}

    operator = device(read_json(filler.OPERATOR), "softmax flash")
    parts = filler.cuda_parts(operator, device(read_json(filler.MODEL), "softmax"))
    shown, explained = parts[filler.COST_PAGE], parts[filler.BACKENDS_PAGE]
    assert set(shown) == {"cuda model"}
    assert {"cuda speed", "cuda throughput", "cuda decode", "cuda memory", "cuda thresholds"} == set(explained)
    assert "`softmax flash`" in explained["cuda speed"]
    assert "noted of the bench operator" in explained["cuda speed"]
    assert "noted of the bench model" in shown["cuda model"]
    assert explained["cuda throughput"] == "Not measured."
    assert explained["cuda thresholds"].count("training step") == 2
    path = tmp_path / "page.md"
    path.write_text("".join(f"<!-- {name} -->\nstale\n<!-- /{name} -->\n" for name in explained), encoding="utf-8")
    replace_sections(path, explained)
    assert "stale" not in path.read_text(encoding="utf-8")
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold <!-- cuda speed --> … <!-- /cuda speed --> once"):
        replace_sections(path, explained)
