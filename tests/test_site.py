"""The documentation's site is built, its links and anchors lead somewhere, and it loads nothing from anywhere else."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

if sys.version_info < (3, 11):
    pytest.skip("zensical needs Python 3.11", allow_module_level=True)

import build_site
import site_pages
import tutorial_pages

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REPOSITORY = "https://example.org/repository"
# Where a browser loads a thing from, and does not only go to when the reader asks for it.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src")}
LESSON = """\
# %% [markdown]
# # A lesson
#
# Says what one learns. The page of [training](../training.md).

# %%
# %config InlineBackend.figure_formats = ["svg"]
value = 1

# %% [markdown]
# ## More
"""


class Page(HTMLParser):
    """The places that a page has, and where it leads: (tag, attribute, address)."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.leads: list[tuple[str, str, str]] = []
        self.relations: dict[str, str] = {}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}
        for name in ("href", "src"):
            if address := given.get(name):
                self.leads.append((tag, name, address))
                self.relations[address] = given.get("rel") or ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    explorer = folder / "page.html"
    explorer.write_text("<!doctype html><title>maps</title>", encoding="utf-8")
    build_site.build(folder / "site", explorer, with_outputs=False)
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in site.rglob("*.html")}


@pytest.mark.all
def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for _, _, address in page.leads:
            url = urlsplit(address)
            # The page of an error is shown at any address, and has absolute ones.
            if url.scheme or url.netloc or file.name == "404.html":
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(url.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].places):
                broken.append(f"{file.relative_to(site)}: {address}")
    assert not broken
    assert ("iframe", "src", "explorer-page.html") in pages[site / "index.html"].leads, "the start page's picture, live"


@pytest.mark.all
def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for file, page in pages.items():
        for tag, name, address in page.leads:
            if (tag, name) in LOADED or "stylesheet" in page.relations[address] or "preload" in page.relations[address]:
                assert not urlsplit(address).netloc, f"{file.relative_to(site)} loads {address}"
    for style in (site / "assets").rglob("*.css"):
        for address in re.findall(r"url\(['\"]?([^'\")]+)", style.read_text(encoding="utf-8")):
            assert address.startswith(("data:", "#")) or (style.parent / address).is_file(), f"{style}: {address}"


@pytest.mark.all
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_pages_fit_a_phone_and_show_their_equations(site: Path, pages: dict[Path, Page]) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    asked = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 390, "height": 844})
        shown.on("request", lambda request: asked.append(request.url))
        for file in pages:
            shown.goto(file.as_uri(), timeout=120_000)
            name = file.relative_to(site).as_posix()
            assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than a phone"
            equations = shown.locator(".arithmatex")
            assert equations.count() == shown.locator(".arithmatex .katex").count(), name
            assert not shown.locator(".katex-error").count(), name
        browser.close()
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]


@pytest.mark.all
def test_the_api_comes_from_the_docstrings(site: Path, pages: dict[Path, Page]) -> None:
    """Roles have become links, and no equation of theirs is searched for."""
    operator = pages[site / "api" / "operator.html"]
    assert "diff_transformer.diff_attention" in operator.places
    assert "#diff_transformer.diff_attention" in {address for _, _, address in operator.leads}
    for file in (site / "api").glob("*.html"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(":(func|class|meth|mod|attr):", text), file.name
        # What a function returns is one entry: lines of its text would be values of their own otherwise.
        for returned in re.findall(r"Returns:</span>(.*?)</ul>", text, flags=re.DOTALL):
            assert returned.count("<li") == 1, f"{file.name}: {returned}"
    for item in json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]:
        prose = re.sub(r"<code>.*?</code>", "", item["text"], flags=re.DOTALL)
        assert not re.search(r"\\[(\[a-z]", prose), item["location"]


@pytest.mark.all
def test_every_page_is_in_the_navigation(pages: dict[Path, Page], site: Path) -> None:
    """By the links of the start page: one that nothing leads to would be there in vain."""
    settings = yaml.safe_load((ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(settings["nav"])))
    written = {path for path in site_pages.pages_and_pictures(ROOT).values() if path.endswith(".md")}
    # The table of results leads to the pages of experiments.
    of_experiments = {path for path in written if path.startswith("results/experiments/")}
    assert listed == written - of_experiments - {"tutorials/index.md"}
    leads = {address for _, _, address in pages[site / "results" / "index.html"].leads}
    assert {path.removeprefix("results/").replace(".md", ".html") for path in of_experiments} <= leads
    assert {f"../tutorials/{path.name}" for path in (site / "tutorials").glob("*.html")} <= leads
    assert {path.relative_to(site).with_suffix(".md").as_posix() for path in pages} >= written


def test_what_git_ignores_is_no_page(tmp_path: Path) -> None:
    """A tutorial that is opened in Jupyter writes a report among the pages."""
    report = tmp_path / "docs" / "tutorials" / "runs" / "RESULTS.md"
    report.parent.mkdir(parents=True)
    for file in (report, tmp_path / "docs" / "page.md", tmp_path / "docs" / "a new one.md"):
        file.write_text("# Title\n", encoding="utf-8")
    (tmp_path / ".gitignore").write_text("runs/\n", encoding="utf-8")
    for command in (["init", "--quiet"], ["add", "docs/page.md"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert site_pages.pages_and_pictures(tmp_path) == {"docs/a new one.md": "a new one.md", "docs/page.md": "page.md"}


@pytest.fixture
def lesson_file(tmp_path: Path) -> Path:
    file = tmp_path / "docs" / "tutorials" / "a_lesson.py"
    file.parent.mkdir(parents=True)
    file.write_text(LESSON, encoding="utf-8")
    return file


def test_tutorials_become_pages_in_the_order_of_their_contents(lesson_file: Path, tmp_path: Path) -> None:
    for name in ("b", "c"):
        (lesson_file.parent / f"{name}.py").write_text(LESSON, encoding="utf-8")
    (lesson_file.parent / "README.md").write_text("[the second](b.py)", encoding="utf-8")
    first, lesson, last = tutorial_pages.tutorials(tmp_path, REPOSITORY, None)
    assert (first.target, last.target) == ("tutorials/b.md", "tutorials/c.md")
    assert (lesson.title, lesson.target) == ("A lesson", "tutorials/a-lesson.md")
    assert "```python\nvalue = 1\n```" in lesson.text
    assert "%config" not in lesson.text
    assert f"{REPOSITORY}/blob/main/docs/tutorials/a_lesson.py" in lesson.text
    assert lesson.text.endswith("## More\n")
    lesson_file.write_text("# %%\nvalue = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a_lesson\.py must begin with a heading, got"):
        tutorial_pages.tutorials(tmp_path, REPOSITORY, None)


@pytest.mark.all
def test_a_tutorial_is_run_once(lesson_file: Path, tmp_path: Path) -> None:
    drawing = "from IPython.display import SVG, display\nprint('said')\ndisplay(SVG('<svg xmlns=\"x\"/>'))\n"
    drawing += "from pathlib import Path\nPath('written').touch()\n"
    drawing += "print(sorted(path.name for path in Path('../..').iterdir()))\n"
    drawing += '\n# %% tags=["needs-a_package_of_nobody"]\nimport a_package_of_nobody\n'
    lesson_file.write_text(LESSON.replace("value = 1\n", drawing), encoding="utf-8")
    (lesson,) = tutorial_pages.tutorials(tmp_path, REPOSITORY, tmp_path / "run")
    assert "```text\nsaid\n" in lesson.text
    assert "['docs', 'examples', 'lab']" in lesson.text
    assert list(lesson_file.parent.iterdir()) == [lesson_file]  # what it writes is gone with the copy of its place
    assert "```python\nimport a_package_of_nobody\n```" in lesson.text  # shown, and not run
    assert list(lesson.pictures) == ["a-lesson-1-1.svg"]
    assert "](a-lesson-1-1.svg)" in lesson.text
    (notebook,) = (tmp_path / "run").iterdir()
    written = notebook.stat().st_mtime_ns
    assert tutorial_pages.tutorials(tmp_path, REPOSITORY, tmp_path / "run") == [lesson]
    assert notebook.stat().st_mtime_ns == written


TARGETS = {
    "docs/page.md": "page.md",
    "docs/concepts/other.md": "concepts/other.md",
    "lab/results/R.md": "results/index.md",
}


@pytest.mark.parametrize(
    ("source", "text", "moved"),
    [
        ("docs/page.md", "[a](concepts/other.md#part)", "[a](concepts/other.md#part)"),
        ("docs/concepts/other.md", "[a](../../lab/results/R.md)", "[a](../results/index.md)"),
        ("docs/page.md", "[a](../src/x.py)", f"[a]({REPOSITORY}/blob/main/src/x.py)"),
        ("docs/page.md", "[a](../src)", f"[a]({REPOSITORY}/tree/main/src)"),
        ("docs/page.md", '<img src="../src/x.py">', f'<img src="{REPOSITORY}/blob/main/src/x.py">'),
        ("docs/page.md", "[a](#part) [b](https://x.org/y)", "[a](#part) [b](https://x.org/y)"),
        ("docs/page.md", "`[a](none.md)`\n\n```\n[a](none.md)\n```\n", "`[a](none.md)`\n\n```\n[a](none.md)\n```\n"),
        ("docs/page.md", "<!-- speed -->\n| a |\n<!-- /speed -->\n", "| a |\n"),
    ],
)
def test_links_are_those_of_the_site(source: str, text: str, moved: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.py").write_text("", encoding="utf-8")
    assert site_pages.on_the_site(text, source, tmp_path, TARGETS, REPOSITORY) == moved


def test_a_link_to_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"docs/page\.md links to none\.md, which does not exist\."):
        site_pages.on_the_site("[a](none.md)", "docs/page.md", tmp_path, TARGETS, REPOSITORY)
