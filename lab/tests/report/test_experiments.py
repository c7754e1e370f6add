"""The report of experiments: nothing that was compared is left out of it, and what was lost stands as what was won."""

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

import made_up_results
from diff_lab.coordinates import Coordinates
from diff_lab.record import Better, Comparison, Headline, Result, ResultsFile
from diff_lab.report.findings import ExperimentResults, holds_experiments, read_experiments
from diff_lab.report.pages import build_results_report
from diff_lab.results_files import write_json
from diff_lab.statistics import compare
from made_up_results import made_up, trained
from table_cells import tables

PAIR = ("diff", "softmax")
LONG = "softmax, half the heads, headwise norm, and a name that goes on for longer than any table is wide"
EVIL = "<script>alert(1)</script> | `x` *y* [z](http://w) &"
NOTE = "A note that must be read: 5 % | of <b>it</b>."
# Differences of three seeds → the verdict on "lower is better".
OUTCOMES = {"reproduced": (-0.20, -0.21, -0.19), "contrary": (0.20, 0.21, 0.19), "inconclusive": (0.20, -0.21, 0.19)}


def records(
    name: str,
    differences: Sequence[float],
    *,
    variants: tuple[str, str] = PAIR,
    better: Better | None = "lower",
    **more: Any,
) -> list[Result]:
    """A measure of two variants that are so far apart, seed by seed; both are lost where the difference is."""
    seconds = [2.0 + 0.01 * seed + 0 * apart for seed, apart in enumerate(differences)]
    firsts = [second + apart for second, apart in zip(seconds, differences, strict=True)]
    return made_up_results.measured(name, dict(zip(variants, (firsts, seconds), strict=True)), better=better, **more)


def outcomes() -> ResultsFile:
    """Every verdict, and none; variants that vary; the paper's values, one of them, and none."""
    measured, compared = [], []
    for verdict, differences in OUTCOMES.items():
        measured += records(f"made_up/{verdict}", differences, unit="nats/token")
        compared.append(compare(measured, f"made_up/{verdict}", *PAIR, paper=(3.062, 3.087)))
    measured += records("made_up/reproduced", OUTCOMES["contrary"], variants=(LONG, EVIL), unit="nats/token")
    compared.append(compare(measured, "made_up/reproduced", LONG, EVIL, claimed=False))
    measured += records("made_up/alone", (0.1,), better="higher")
    compared.append(compare(measured, "made_up/alone", *PAIR, paper=(0.606, math.nan)))
    measured += records("made_up/lost", (0.1, math.nan, 0.2), coordinates=Coordinates(part=EVIL))
    compared.append(compare(measured, "made_up/lost", *PAIR, coordinates=Coordinates(part=EVIL), paper=(318.0, 38.8)))
    results = made_up("table6", measured, compared, trained(*PAIR), notes=[NOTE])
    return replace(results, headline=Headline(name="made_up/contrary", claim="DIFF wins"))


def steps() -> ResultsFile:
    """Many parts with numbers in their names; one run of the last diverged."""
    measured, compared = [], []
    for step in range(0, 300, 10):
        apart = (math.nan, 0.1) if step == 290 else (-0.001 * step, -0.0011 * step)
        measured += records("made_up/loss", apart, coordinates=Coordinates(step=step))
        compared.append(compare(measured, "made_up/loss", *PAIR, coordinates=Coordinates(step=step), paper=(1.0, 1.2)))
    headline = Headline(name="made_up/loss", coordinates=Coordinates(step=0))
    return replace(made_up("fig3", measured, compared), headline=headline)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three results files and their report."""
    place = tmp_path_factory.mktemp("results")
    write_json(place / "table6.json", outcomes())
    write_json(place / "fig3.json", steps())
    write_json(place / "v2.json", made_up("v2", [], []))
    (place / "other.json").write_text('{"not": "ours"}', encoding="utf-8")
    build_results_report([place])
    return place


def document(folder: Path) -> str:
    """The document, the method and the pages of all experiments, one after the other."""
    pages = [folder / "RESULTS.md", folder / "METHOD.md", *sorted((folder / "experiments").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.is_file())


def all_comparisons(folder: Path) -> list[Comparison]:
    return [row for results in read_experiments([folder]) for row in results.file.comparisons]


def test_tables_are_well_formed_and_hold_every_comparison(folder: Path) -> None:
    parsed = tables(document(folder))
    # A reader of Markdown fills rows up and cuts them off in silence.
    written = [block.splitlines() for block in document(folder).split("\n\n") if block.startswith("|")]
    for lines, rows in zip(written, parsed, strict=True):
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(rows[0]) + 1}
        assert len(lines) == len(rows) + 1
    # What is decided, and of what was compared two tables; what was trained, one.
    assert len(parsed) == 4
    compared = [rows for rows in parsed if rows[0][0] == "Measure"]
    assert sum(len(rows) - 1 for rows in compared) == len(all_comparisons(folder)) == 36


def test_every_number_of_a_row(folder: Path) -> None:
    (table,) = [rows for rows in tables(document(folder)) if rows[1][0].startswith("reproduced")]
    rows = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    words = ["reproduced", "contrary", "inconclusive", "nothing claimed", "inconclusive", "inconclusive"]
    assert [row["Verdict"].partition(":")[0] for row in rows] == words
    assert rows[1] == {
        "Measure": "contrary (nats/token) ↓",
        "First − second": "DIFF − Transformer",
        "Paper": "3.062 / 3.087",
        "Here": "2.210 / 2.010",
        "Difference": "+0.200 [+0.175, +0.225]",
        "Seeds": "3",
        "Verdict": "contrary",
    }
    needed = compare(records("a", OUTCOMES["inconclusive"]), "a", *PAIR).seeds_needed
    assert rows[2]["Verdict"].startswith(f"inconclusive: {needed} seeds would find such a difference")
    assert (rows[3]["First − second"], rows[3]["Paper"]) == (f"Transformer{LONG[7:]} − {EVIL}", "–")
    alone = ("0.606 / –", "+0.100, no interval", "inconclusive: one seed")
    assert (rows[4]["Paper"], rows[4]["Difference"], rows[4]["Verdict"]) == alone
    assert rows[5]["Measure"] == f"lost, {EVIL} ↓"
    assert (rows[5]["Here"], rows[5]["Difference"]) == ("not known / not known", "not known")


def test_the_document_opens_with_what_is_decided_and_then_what_is_not(folder: Path) -> None:
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    (table,) = tables(text)
    assert [dict(zip(table[0], row, strict=True)) for row in table[1:]] == [
        {
            "Experiment": "Table 6",
            "Claim": "DIFF wins",
            "Holds": "no",
            "First against second, difference": "2.210 against 2.010 nats/token, +0.200 [+0.175, +0.225]",
            "p (Holm)": "0.002",
            "Seeds": "3",
            "Remark": "–",
        }
    ]
    undecided = (
        "- [Figure 3](experiments/fig3-cpu.md): DIFF has a lower loss, step 0 than the Transformer: 2.005 against"
    )
    others = "- [V2](experiments/v2-cpu.md): What v2 shows."
    places = [text.index(words) for words in ("experiments/table6-cpu.md", undecided, others, "(METHOD.md)")]
    assert places == sorted(places)
    # In no place does a verdict decide how something is set.
    assert not re.search(r"[*_]{1,2}(reproduced|contrary|inconclusive)", document(folder))


def test_the_document_says_where_numbers_come_from(folder: Path) -> None:
    text = document(folder)
    for words in (
        "fixed before anything was run",
        "changed after a look at",
        "docs/log.md",
        "No verdict is corrected for the number of comparisons",
        "not independent of each other",
        "\n    diff-lab reproduce table6\n",
        "on AMD EPYC 7763, 2 threads, 2026-01-01T12:00:00+00:00, commit 0123456789abcdef0123456789abcdef01234567",
        "python 3.11.7, torch 2.13.0, in 1.5 min, by\n",
        "- A note that must be read: 5 % \\| of \\<b\\>it\\</b\\>.",
        "| DIFF | 812,825 | 812,345 | – | 0.003 | 0.003: 1.500; 0.006: diverged | 2 |",
        "Nothing could be compared.",
        "Intervals by: Student's t over paired seeds.",
    ):
        assert words in text, words
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    assert "<script" not in rendered
    assert not re.search(r'href="http', rendered)
    assert '<a href="experiments/table6-cpu.md">Table 6</a>' in rendered


def test_figures_are_xml_and_are_shown(folder: Path) -> None:
    linked = set(re.findall(r"\]\(\.\./(figures/[^)]+\.svg)\)", document(folder)))
    files = {f"figures/{path.name}": path for path in (folder / "figures").iterdir()}
    assert linked == files.keys() == {"figures/fig3-cpu-loss.svg"}
    for path in files.values():
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.attrib["width"] == "345.6pt"
        assert "DIFF goes from 2.005 to not known" in (root.findtext("{http://www.w3.org/2000/svg}desc") or "")


def test_the_same_results_give_the_same_files_also_over_those_of_an_earlier_version(tmp_path: Path) -> None:
    write_json(tmp_path / "fig3.json", steps())
    build_results_report([tmp_path])
    first = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert first.keys() == {"RESULTS.md", "fig3.json", "fig3-cpu-loss.svg"}
    for path in (tmp_path / "RESULTS.md", tmp_path / "figures" / "fig3-cpu-loss.svg"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("diff-lab report", "diff-transformer report"), encoding="utf-8")  # as of 0.2.0
    build_results_report([tmp_path / "fig3.json"])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == first


def test_a_single_experiment_stands_in_the_document(tmp_path: Path) -> None:
    write_json(tmp_path / "table6.json", outcomes())
    build_results_report([tmp_path])
    assert not (tmp_path / "METHOD.md").exists()
    text = document(tmp_path)
    assert "[Table 6](#table6-cpu)" in text
    assert '<a id="table6-cpu"></a>' in text
    headings = ["# Results beside the paper's", "## Table 6, preset cpu", "## How verdicts are made", "### The rule"]
    assert re.findall("^#.*", text, re.MULTILINE)[:4] == headings
    assert text.count("<!-- Written by") == 1


def test_where_the_report_goes_and_two_presets_are_told_apart(tmp_path: Path) -> None:
    compared = [compare(records("a", OUTCOMES["contrary"]), "a", *PAIR)]
    for preset in ("cpu", "gpu"):
        (tmp_path / "all" / preset).mkdir(parents=True)
        results = made_up("table6", [], compared, preset=preset)
        write_json(tmp_path / "all" / preset / "table6.json", replace(results, headline=Headline(name="a")))
    assert build_results_report([tmp_path / "all"]) == tmp_path / "all" / "RESULTS.md"
    for preset in ("cpu", "gpu"):
        assert f"[Table 6, preset {preset}](experiments/table6-{preset}.md)" in document(tmp_path / "all")
        page = tmp_path / "all" / "experiments" / f"table6-{preset}.md"
        assert f"# Table 6, preset {preset}\n" in page.read_text(encoding="utf-8")
    files = [tmp_path / "all" / preset / "table6.json" for preset in ("gpu", "cpu")]
    assert build_results_report(files) == (tmp_path / "all").resolve() / "RESULTS.md"


def test_results_on_different_texts_stand_beside_each_other(tmp_path: Path) -> None:
    compared = [compare(records("a", OUTCOMES["inconclusive"]), "a", *PAIR)]
    for number, text in enumerate(([], ["/data/novels"], ["/data/книги", "/data/play.txt"])):
        write_json(tmp_path / f"{number}.json", made_up("language", [], compared, text=text))
    no_text = made_up("language", [], compared, preset="night", text=[], recipe="recall")  # not Python code either
    write_json(tmp_path / "task.json", no_text)
    build_results_report([tmp_path])
    assert "[Language](experiments/language-night.md)" in document(tmp_path)
    titles = ("Language on Python code", "Language on novels", "Language on книги, play.txt")
    anchors = ("language-cpu", "language-cpu-novels", "language-cpu-книги-play.txt")
    for title, anchor in zip(titles, anchors, strict=True):
        assert f"[{title}](experiments/{anchor}.md)" in document(tmp_path)
        assert (tmp_path / "experiments" / f"{anchor}.md").is_file()
    write_json(tmp_path / "3.json", made_up("language", [], compared, text=text))
    with pytest.raises(ValueError, match=r"'language' with the preset 'cpu' on книги, play.txt; give one of them"):
        build_results_report([tmp_path])


def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", outcomes())
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        build_results_report([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty' holds no results of an experiment"):
        build_results_report([tmp_path, tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"page\.txt' must end in \.md"):
        build_results_report([tmp_path], tmp_path / "page.txt")
    with pytest.raises(FileNotFoundError, match=r"the folder of .*R\.md' does not exist"):
        build_results_report([tmp_path], tmp_path / "no" / "R.md")
    (tmp_path / "letter.md").write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"letter\.md' exists and is not a report"):
        build_results_report([tmp_path], tmp_path / "letter.md")
    assert (tmp_path / "letter.md").read_text(encoding="utf-8") == "mine"
    (tmp_path / "figures").mkdir()
    write_json(tmp_path / "fig3.json", steps())
    (tmp_path / "experiments").mkdir()
    for mine in (tmp_path / "figures" / "fig3-cpu-loss.svg", tmp_path / "experiments" / "fig3-cpu.md"):
        mine.write_text("mine", encoding="utf-8")
        with pytest.raises(FileExistsError, match=f"{mine.name}' exists"):
            build_results_report([tmp_path])
        mine.unlink()
    write_json(tmp_path / "b.json", outcomes())
    with pytest.raises(ValueError, match="are both results of 'table6' with the preset 'cpu'; give one"):
        build_results_report([tmp_path])
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    del content["records"]
    (tmp_path / "b.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"b\.json: the file\.records is missing"):
        build_results_report([tmp_path])
    assert not list(tmp_path.rglob("RESULTS*"))


def test_runs_and_demos_are_none(tmp_path: Path, make_demo: Callable[[Path], Path]) -> None:
    demo = make_demo(tmp_path / "demo")
    assert not holds_experiments(demo)
    assert not holds_experiments(demo / "diff")
    assert not holds_experiments(tmp_path / "nowhere")
    write_json(tmp_path / "table6.json", outcomes())
    assert holds_experiments(tmp_path)
    assert holds_experiments(tmp_path / "table6.json")
    # One level down, and not two.
    assert not holds_experiments(demo / "results.json")


def test_titles_and_order(tmp_path: Path) -> None:
    names = ("recall", "fig8", "table10", "appendix_g", "table6", "lr_sensitivity", "fig10")
    for name in names:
        write_json(tmp_path / f"{name}.json", made_up(name, [], []))
    assert [results.title for results in read_experiments([tmp_path])] == [
        "Table 6",
        "Table 10",
        "Figure 8",
        "Figure 10",
        "Appendix G",
        "LR sensitivity",
        "Recall",
    ]


def test_the_headline_is_the_one_that_is_named_else_the_first_that_is_judged() -> None:
    measured, compared = [], []
    for name, differences in zip("abc", OUTCOMES.values(), strict=True):
        measured += records(name, differences)
        compared.append(compare(measured, name, *PAIR, claimed=name != "a", paper=(1.0, 2.0) if name == "c" else None))
    results = made_up("v2", measured, compared)
    assert [
        ExperimentResults("v2", "cpu", replace(results, headline=headline)).headline.name  # type: ignore[union-attr]
        for headline in (Headline(name="b"), None, Headline(name="b", variant="other"))
    ] == ["b", "c", "c"]
    unclaimed = ExperimentResults("v2", "cpu", replace(results, comparisons=tuple(compared[:1])))
    assert unclaimed.headline is None
