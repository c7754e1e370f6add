"""The README's code runs, and what it says of files and commands is true."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from diff_lab.bench.bench_pages import page, replace_sections
from diff_transformer.utils.files import read_json

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_it_is_short() -> None:
    assert BLOCKS
    assert README.count("\n") <= 120


def test_it_names_the_words_that_people_search_for() -> None:
    words = ("drop-in", "KV cache", "perplexity", "few-shot", "fine-tune", "hyperparameter", "speedup", "DiffLlama")
    assert not [word for word in words if word not in README]


def test_installing_and_looking_come_first() -> None:
    first_screen = README.split("```python")[0]
    assert "pip install" in first_screen
    assert "diff-transformer explore" in first_screen
    assert {"make demo", "make test"} <= set(re.findall(r"make \w+", README))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.fixture(scope="module")
def filler() -> Any:
    spec = importlib.util.spec_from_file_location("fill_readme", ROOT / "lab" / "benchmarks" / "fill_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_are_those_that_were_measured(filler: Any) -> None:
    operator, model = read_json(filler.OPERATOR), read_json(filler.MODEL)
    amx_operator, amx_model = read_json(filler.AMX_OPERATOR), read_json(filler.AMX_MODEL)
    experiments = filler.measured_experiments()
    parts = {"known": filler.known(experiments, "lab/results/RESULTS.md")}
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


def test_no_number_is_of_a_checkout_with_changes(filler: Any) -> None:
    operator, model = read_json(filler.OPERATOR), read_json(filler.MODEL)
    dirty = {**model, "commit": f"{model['commit']}-dirty"}
    table = filler.costs([(operator, model), (operator, dirty)])
    assert "dirty" not in README + table
    assert table.count("| – |") == 2


def test_what_is_known_is_corrected_for_the_number_of_comparisons(filler: Any) -> None:
    """Of the two that the README names, and none that only an uncorrected interval decides."""
    known = filler.known(filler.measured_experiments(), "lab/results/RESULTS.md")
    assert re.findall(r"^- \[([^\]]+)\]", known, flags=re.MULTILINE) == ["V2", "Table 3"]


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
    places = {"costs", "speed", "throughput", "decode", "memory"}
    assert set(explained) == {f"cuda {place}" for place in places}
    assert "| attention, decode, d 64, 2,048 tokens |" in explained["cuda costs"]
    assert re.findall(r"[|] (\w+, [a-z+ ]+),", parts[filler.README]["cuda costs"]) == [
        "attention, forward + backward",
        "model, training step",
        "model, training step",
    ]
    assert "`softmax flash`" in explained["cuda speed"]
    assert "noted of the bench operator" in explained["cuda speed"]
    assert "noted of the bench model" in shown["cuda model"]
    assert explained["cuda throughput"] == "Not measured."
    path = tmp_path / "page.md"
    path.write_text("".join(f"<!-- {name} -->\nstale\n<!-- /{name} -->\n" for name in explained), encoding="utf-8")
    replace_sections(path, explained)
    assert "stale" not in path.read_text(encoding="utf-8")
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold <!-- cuda speed --> … <!-- /cuda speed --> once"):
        replace_sections(path, explained)
