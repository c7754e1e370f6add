"""The page of training runs, those of a demo among them: one file that loads nothing and runs nothing."""

import base64
import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from diff_lab.report.pages import build_run_report
from diff_transformer.explorer.page import page_html

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """A page read strictly enough to see wrong nesting, with its text and everything that would be loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.labels: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.tags.append(tag)
        self.loads += [named[name] or "" for name in ("src", "href", "data", "action") if name in named]
        self.labels += [named["alt"] or ""] if "alt" in named else []
        if tag not in VOID:
            self.open.append(tag)

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
    assert demo_page.name == "report.html"
    page = Page(demo_page)
    for text in (
        "A Differential Transformer beside a Transformer",
        "diff-lab demo --seed 0",
        "AMD EPYC 7763",
        "torch 2.13.0",
        "commit 0123456789",
        "0.547 [0.525, 0.569]",
        "0.254 [0.232, 0.276]",
        "accuracy by λ, λ × 0.5",
        "0.497",
        "No verdict",
        "812,825",
        "answers 54.7% of the questions right, with λ = 0 44.7%",
        "0.60, what the question k3 gives to its answer v5.",
        "0.20, what the question k3 gives to its answer v5; its largest weight is 0.70, to k3.",
    ):
        assert text in page.text, text
    # Accuracy by λ and two maps; the loss, two validations, and λ of DIFF.
    assert len(page.labels) == page.tags.count("figure") == 7
    accuracy = next(label for label in page.labels if label.startswith("Validation: accuracy"))
    assert "DIFF goes from 0.125 to 0.500" in accuracy
    assert "floor 0.34" in accuracy
    assert "λ of DIFF: layer 1 goes from 0.200 to 0.200; layer 2 goes from 0.501 to 0.600." in page.labels
    # One seed decides nothing: no cell of the page is set apart from the others.
    assert "<td>" in demo_page.read_text(encoding="utf-8")
    assert "<td " not in demo_page.read_text(encoding="utf-8")


def test_the_page_is_one_file_that_loads_and_runs_nothing(demo_page: Path) -> None:
    page = Page(demo_page)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    images = page.loads
    prefix = "data:image/svg+xml;base64,"
    assert all(image.startswith(prefix) for image in images)
    drawing = base64.b64decode(images[0].removeprefix(prefix)).decode()
    assert "<svg" in drawing
    assert not re.search(r"<script|<image|url\((?!#)", drawing)
    source = demo_page.read_text(encoding="utf-8")
    assert "http" not in source.replace("http-equiv", "")
    assert "default-src 'none'" in source


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
    assert 'sandbox="allow-scripts allow-downloads allow-popups ' in more
    assert "allow-same-origin" not in more
    assert "<script" not in source
    assert "src=" not in more
    (demo_dir / "explorer.html").write_text("<!doctype html>", encoding="utf-8")
    source = build_run_report([demo_dir]).read_text(encoding="utf-8")
    assert "<iframe" not in source, "a file of that name that is no explorer"
    assert "script-src" not in source


def test_whatever_files_say_is_text(demo_dir: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    results = json.loads((demo_dir / "results.json").read_text(encoding="utf-8"))
    for key in ("title", "command", "device", "created", "commit"):
        results[key] = evil + key
    results["versions"] = {evil: evil}
    results["records"].append(results["records"][0] | {"name": f"{evil}/{evil}", "variant": evil, "unit": evil})
    results["settings"]["view"]["words"] = [evil] * 3
    (demo_dir / "results.json").write_text(json.dumps(results), encoding="utf-8")
    metrics = [json.dumps({"step": step, "loss": 1.0, f"validation/{evil}": 1.0}) + "\n" for step in (1, 2)]
    (demo_dir / "diff" / "metrics.jsonl").write_text("".join(metrics), encoding="utf-8")
    path = build_run_report([demo_dir])
    assert "script" not in Page(path).tags
    for key in ("title", "command", "device", "created", "commit"):
        assert evil + key in Page(path).text


def test_a_demo_that_has_not_come_to_its_end(demo_dir: Path) -> None:
    for name in ("results.json", "explorer.html"):
        (demo_dir / name).unlink()
    page = Page(build_run_report([demo_dir]))
    assert "Training of 2 runs" in page.text
    assert "iframe" not in page.tags


def test_runs_stand_side_by_side(demo_dir: Path, tmp_path: Path) -> None:
    runs = [demo_dir / "diff", demo_dir / "softmax"]
    path = build_run_report(runs)
    assert path.resolve() == (demo_dir / "comparison.html").resolve()
    page = Page(path)
    assert "Training of 2 runs" in page.text
    titles = ["Training loss", "Validation: loss", "Validation: accuracy"]
    assert [label.split(": DIFF")[0] for label in page.labels[:3]] == titles
    single = build_run_report([runs[0], runs[0]])
    assert single == runs[0] / "report.html"
    assert "Training of diff" in Page(single).text
    other = shutil.copytree(runs[1], tmp_path / "other" / "softmax")
    both = build_run_report([runs[1], other], tmp_path / "mine.html")
    assert both == tmp_path / "mine.html"
    assert "demo/softmax goes from" in Page(both).labels[0]
    assert "other/softmax goes from" in Page(both).labels[0]


def test_a_run_that_is_still_starting_and_numbers_that_were_not_finite(tmp_path: Path) -> None:
    """They are null in the lines; the curves are those of the others."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "lo', encoding="utf-8")
    assert "Nothing has been logged yet." in Page(build_run_report([tmp_path])).text
    lines = [{"step": step, "loss": 2.0 / step, "lambdas": [0.25, 0.5]} for step in (1, 2)]
    lines.append({"step": 3, "loss": None, "lambdas": [None, 0.5], "validation/accuracy": 0.5})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    labels = Page(build_run_report([tmp_path])).labels
    assert any("goes from 2.000 to 1.000" in label for label in labels)
    assert any("layer 1 goes from 0.250 to 0.250" in label for label in labels)
    assert not any(label.startswith("Validation") for label in labels), "one evaluation is no curve"


def test_wrong_run_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the run folder .*nowhere does not exist"):
        build_run_report([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="is not a run folder: it holds neither"):
        build_run_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"the folder of .*report\.html does not exist"):
        build_run_report([tmp_path], tmp_path / "no" / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_is_not_a_report_is_left_alone_and_a_report_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "letter.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for name in ("letter.txt", "folder"):
        with pytest.raises(FileExistsError, match=name):
            build_run_report([tmp_path], tmp_path / name)
    assert (tmp_path / "letter.txt").read_text(encoding="utf-8") == "mine"
    page = build_run_report([tmp_path])
    before = page.read_text(encoding="utf-8")
    page.write_text(before.replace("</body>", "<p>old</p></body>"), encoding="utf-8")
    assert build_run_report([tmp_path]).read_text(encoding="utf-8") == before
