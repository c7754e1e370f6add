import html
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diff_lab.report.pages import build_run_report
from diff_transformer.explorer.page import page_html

VOID = {"meta", "br", "img", "link", "path", "use", "image", "rect", "circle"}


class Page(HTMLParser):
    """A page read strictly enough to see wrong nesting, with its text and everything that would be loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.labels: list[str] = []
        self.ids: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.tags.append(tag)
        self.loads += [
            value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")
        ]
        self.labels += [named["aria-label"] or ""] if "aria-label" in named else []
        self.ids += [named["id"] or ""] if "id" in named else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One complete demo folder for the tests that only read its page."""
    return build_run_report([request.getfixturevalue("make_demo")(tmp_path_factory.mktemp("demo"))])


def test_the_page_holds_everything_the_demo_measured(demo_page: Path) -> None:
    page = Page(demo_page)
    for text in (
        "A Differential Transformer beside a Transformer",
        "diff-lab demo --seed 0",
        "AMD EPYC 7763",
        "torch 2.13.0",
        "commit 0123456789",
        "0.547 [0.525, 0.569]",
        "0.254 [0.232, 0.276]",
        "No verdict",
        "bits per byte",
        "812,825",
        "head 2 of layer 3 of DIFF (λ = 0.700)",
        "head 5 of layer 4 of Transformer",
        "“v31” (position 31)",
        "DIFF right, Transformer wrong",
        "Attention noise",
        "return self.self",
        '"steps": 600',
        "bootstrap by document",
    ):
        assert text in page.text, text
    assert page.text.count("Loss") >= 2
    # Loss of two tasks, two accuracies, one by depth, four attention measures, four maps, λ of two tasks.
    assert len(page.labels) == page.tags.count("svg") == page.tags.count("figure") == 15
    assert all(len(label) > 30 for label in page.labels)
    assert "note" not in re.findall(r'class="(\w+)"', demo_page.read_text(encoding="utf-8"))


def test_the_page_is_one_file_that_loads_and_runs_nothing(demo_page: Path) -> None:
    page = Page(demo_page)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert page.loads
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in page.loads)
    source = demo_page.read_text(encoding="utf-8")
    assert "http" not in source.replace("http-equiv", "")
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    assert "default-src 'none'" in source
    assert "prefers-color-scheme: dark" in source
    assert {load[1:] for load in page.loads if load.startswith("#")} <= set(page.ids)


@pytest.mark.usefixtures("no_drawings")
def test_the_explorer_is_in_the_page_and_may_run_its_script_and_nothing_else_may(
    demo_dir: Path, tmp_path: Path
) -> None:
    """In a frame that holds it, as a page that is sent alone has no file beside it."""
    (demo_dir / "explorer.html").write_text(page_html({"text": '"<b>&'}, title="", may_ask=False), encoding="utf-8")
    source = build_run_report([demo_dir], tmp_path / "page.html").read_text(encoding="utf-8")
    (policy, *_) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)
    (script,) = re.findall(r"'(sha256-[^']*)'", policy)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src '{script}'"
    ((held, more),) = re.findall(r'<iframe srcdoc="([^"]*)"([^>]*)>', source)
    assert html.unescape(held) == (demo_dir / "explorer.html").read_text(encoding="utf-8")
    assert f"script-src '{script}'" in html.unescape(held)
    assert 'sandbox="allow-scripts allow-downloads"' in more, "not allow-same-origin"
    assert "<script" not in source
    assert "src=" not in more
    (demo_dir / "explorer.html").write_text("<!doctype html>", encoding="utf-8")
    source = build_run_report([demo_dir]).read_text(encoding="utf-8")
    assert "<iframe" not in source, "a file of that name that is no explorer"
    assert "script-src" not in source


def test_ids_are_the_pages_own_and_what_refers_to_one_finds_it_in_its_figure(demo_page: Path) -> None:
    page = Page(demo_page)
    assert len(page.ids) == len(set(page.ids))
    drawings = re.findall(r"<svg .*?</svg>", demo_page.read_text(encoding="utf-8"), flags=re.DOTALL)
    referring = 0
    for drawing in drawings:
        ids = set(re.findall(r' id="([^"]*)"', drawing))
        named = set(re.findall(r'(?:href="#|url\(#)([^")]*)', drawing))
        assert named <= ids
        referring += bool(named)
    assert referring == len(drawings)


def test_what_one_query_attends_to_comes_first(demo_page: Path) -> None:
    page = Page(demo_page)
    titles = ["DIFF: A1", "DIFF: λA2", "DIFF: A1 − λA2", "Transformer: A"]
    assert [label.partition(": every query's")[0] for label in page.labels[:4]] == titles
    source = demo_page.read_text(encoding="utf-8")
    first = re.findall(r"<figure.*?</figure>", source, flags=re.DOTALL)[0]
    for token in ("k10 v11", "k30 v31", "▸ k90?", "k87?"):
        assert f">{token}</text>" in first, "tokens are named"
    assert source.index("<figure") < source.index("<table")


def test_a_narrow_screen_shows_every_cell_with_the_head_of_its_column(demo_page: Path) -> None:
    source = demo_page.read_text(encoding="utf-8")
    head = re.findall(r'<th scope="col">([^<]*)</th>', source[: source.index("<tbody>")])
    row = re.search(r'<tr><th scope="row">accuracy ↑</th>(.*?)</tr>', source)
    assert row is not None
    assert re.findall(r'data-head="([^"]*)"', row[1]) == head[1:] == ["DIFF", "Transformer"]
    narrow = source[source.index("@media (max-width: 40rem)") : source.index("@media print")]
    assert "content: attr(data-head)" in narrow
    assert "display: block" in narrow
    assert "min-width: 34rem" not in source


def test_single_measurements_favour_nobody(demo_page: Path) -> None:
    """One seed decides nothing: no cell of the page is set apart from the others."""
    source = demo_page.read_text(encoding="utf-8")
    assert set(re.findall(r'<td [^>]*class="([^"]*)"', source)) == {"number"}
    assert "Better" not in re.findall(r'<th scope="col">([^<]*)</th>', source)


def test_whatever_files_say_is_text(demo_dir: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    results = json.loads((demo_dir / "results.json").read_text(encoding="utf-8"))
    for key in ("title", "command", "device", "created", "commit"):
        results[key] = evil + key
    results["versions"] = {evil: evil}
    results["settings"] = {evil: evil}
    for record in results["records"]:
        record["method"] = evil
        if "coordinates" in record:
            record["coordinates"] = {evil: evil}
    results["records"].append(results["records"][0] | {"name": f"{evil}/{evil}", "variant": evil, "unit": evil})
    (demo_dir / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (demo_dir / "samples.json").write_text(
        json.dumps({"prompt": evil, "diff": evil, "softmax": evil}), encoding="utf-8"
    )
    attention = json.loads((demo_dir / "attention.json").read_text(encoding="utf-8"))
    attention["tokens"] = [evil] * len(attention["tokens"])
    (demo_dir / "attention.json").write_text(json.dumps(attention), encoding="utf-8")
    metrics = [json.dumps({"step": step, "loss": 1.0, f"validation/{evil}": 1.0}) + "\n" for step in (1, 2)]
    (demo_dir / "retrieval-diff" / "metrics.jsonl").write_text("".join(metrics), encoding="utf-8")
    path = build_run_report([demo_dir])
    page = Page(path)
    assert not {"script", "iframe"} & set(page.tags)
    assert "<script" not in path.read_text(encoding="utf-8")
    for key in ("title", "command", "device", "created", "commit"):
        assert evil + key in page.text
    Page(build_run_report([demo_dir / "retrieval-diff"]))


@pytest.mark.usefixtures("no_drawings")
@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("results.json", "results.json is missing: the demo has not come to its end."),
        ("samples.json", "samples.json is missing"),
        ("attention.json", "attention.json is missing"),
        ("language-diff", "Loss of the language task: Transformer goes"),
    ],
)
def test_a_missing_part_leaves_a_note(demo_dir: Path, missing: str, sentence: str) -> None:
    path = demo_dir / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(build_run_report([demo_dir]))
    assert sentence in page.text + "".join(page.labels)
    (demo_dir / "samples.json").write_text('{"prompt": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"samples\.json: the file lacks diff, softmax"):
        build_run_report([demo_dir])


@pytest.mark.usefixtures("no_drawings")
def test_results_alone_and_no_results_at_all(demo_dir: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    results = json.loads((demo_dir / "results.json").read_text(encoding="utf-8"))
    results["records"] = []
    (alone / "results.json").write_text(json.dumps(results), encoding="utf-8")
    text = Page(build_run_report([alone])).text
    for sentence in (
        "holds no results",
        "no curves to draw",
        "no measures of attention",
        "no maps",
        "No run has logged λ",
    ):
        assert sentence in text
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"empty is not a run folder"):
        build_run_report([empty])
    assert list(empty.iterdir()) == []


@pytest.mark.usefixtures("no_drawings")
def test_runs_stand_side_by_side(demo_dir: Path, tmp_path: Path) -> None:
    runs = [demo_dir / "retrieval-diff", demo_dir / "retrieval-softmax"]
    path = build_run_report(runs)
    assert path.resolve() == (demo_dir / "comparison.html").resolve()
    page = Page(path)
    assert "Training of 2 runs" in page.text
    titles = ["Training loss", "Learning rate", "Gradient norm", "Speed", "Validation: loss", "Validation: accuracy"]
    assert [label.split(": retrieval")[0] for label in page.labels[:6]] == titles
    assert "name: retrieval-softmax" in page.text
    assert page.text.count("One line per layer.") == 1
    single = build_run_report([runs[0], runs[0]])
    assert single == runs[0] / "report.html"
    assert "Training of retrieval-diff" in Page(single).text
    named = build_run_report(runs, tmp_path / "mine.html")
    assert named == tmp_path / "mine.html"


@pytest.mark.all
@pytest.mark.usefixtures("no_drawings")
def test_a_demo_is_its_page_alone_and_its_runs_in_company(
    demo_dir: Path, make_demo: Callable[[Path], Path], tmp_path: Path
) -> None:
    assert build_run_report([demo_dir]) == demo_dir / "report.html"
    assert "How each continues" in Page(demo_dir / "report.html").text
    other = make_demo(tmp_path / "other")
    text = Page(build_run_report([demo_dir, other])).text
    assert "Training of 8 runs" in text
    assert "other/language-softmax" in text
    assert "demo/language-softmax" in text


@pytest.mark.usefixtures("no_drawings")
def test_a_run_that_is_still_starting_and_one_without_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo', encoding="utf-8")
    text = Page(build_run_report([tmp_path])).text
    assert "Nothing has been logged yet." in text
    assert "recipe.yaml is missing." in text


@pytest.mark.usefixtures("no_drawings")
def test_numbers_that_were_not_finite(tmp_path: Path) -> None:
    """They are null in the lines; the curves are those of the others."""
    lines = [{"step": step, "loss": 2.0 / step, "lambdas": [0.25, 0.5]} for step in (1, 2)]
    lines.append({"step": 3, "loss": None, "lambdas": [None, 0.5], "validation/accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    labels = Page(build_run_report([tmp_path])).labels
    assert any("goes from 2.000 to 1.000" in label for label in labels)
    assert any("layer 1 ends at 0.25" in label for label in labels)
    assert not any(label.startswith("Validation") for label in labels), "one evaluation is no curve"


def test_wrong_run_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run folder"):
        build_run_report([])
    with pytest.raises(FileNotFoundError, match=r"the run folder .*nowhere does not exist"):
        build_run_report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="is not a run folder: it holds neither"):
        build_run_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"the folder of .*report\.html does not exist"):
        build_run_report([tmp_path], tmp_path / "no" / "report.html")


@pytest.mark.parametrize("name", ["letter.txt", "folder"])
def test_what_is_not_a_report_is_left_alone(demo_dir: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    if name == "folder":
        place.mkdir()
    else:
        place.write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError, match=name):
        build_run_report([demo_dir], place)
    assert place.is_dir() or place.read_text(encoding="utf-8") == "mine"


@pytest.mark.all
@pytest.mark.usefixtures("no_drawings")
def test_an_earlier_report_is_replaced(demo_dir: Path, tmp_path: Path) -> None:
    page = build_run_report([demo_dir], tmp_path / "page.html")
    before = page.read_text(encoding="utf-8")
    page.write_text(before.replace("</body>", "<p>old</p></body>"), encoding="utf-8")
    assert build_run_report([demo_dir], page).read_text(encoding="utf-8") == before
