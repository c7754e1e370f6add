"""Builds the documentation's site, which needs no network to be read: `make docs` writes build/site.

    python website/build_site.py [--output FOLDER] [--explorer PAGE.HTML] [--no-outputs]

The pages are docs/, the results, CONTRIBUTING.md and CHANGELOG.md. The tutorials are run and become pages with what
they print and draw. The API reference comes from the docstrings. `diff-transformer explore` writes the page of
attention maps. zensical makes HTML of all of it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomllib
import yaml

from site_pages import on_the_site, pages_and_pictures
from tutorial_pages import FOLDER, Tutorial, tutorials

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OUTPUT = ROOT / "build" / "site"
# Tutorials that have been run, as notebooks.
RUN = ROOT / "build" / "tutorials"
# The page of attention maps, which docs/attention-maps.md shows, and the start page in the place of its picture.
EXPLORER = "explorer-page.html"
_HERO = re.compile(r"^!\[([^\]]*)\]\(explorer\.png\)$", flags=re.MULTILINE)
# Equations, as zensical leaves them for KaTeX; in code nothing is one.
_CODE, _EQUATION = (
    re.compile(r"(<code>.*?</code>)", flags=re.DOTALL),
    re.compile(r"\\\(.*?\\\)|\\\[.*?\\\]", flags=re.DOTALL),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the site, which is replaced")
    parser.add_argument("--explorer", type=Path, help="a page that `diff-transformer explore --output` wrote earlier")
    parser.add_argument("--no-outputs", action="store_true", help="do not run the tutorials: code without its outputs")
    options = parser.parse_args(arguments)
    build(options.output, options.explorer, with_outputs=not options.no_outputs)


def build(output: Path, explorer: Path | None = None, *, with_outputs: bool = True) -> None:
    """Build the site.

    Args:
        output: its folder; what was there is replaced once the new site is complete.
        explorer: the page of attention maps; made anew unless given.
        with_outputs: whether tutorials are run, those that have changed since they were run last.

    Raises:
        ValueError: a page links to a file that does not exist.
        subprocess.CalledProcessError: a program failed; it has said why.
    """
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".site-") as folder:
        staged = Path(folder)
        stage(staged / "pages", with_outputs=with_outputs)
        page = staged / "pages" / EXPLORER
        if explorer is None:
            run("diff_transformer.cli", "explore", "--output", str(page))
        else:
            shutil.copy(explorer, page)
        run("zensical", "build", "--strict", "--config-file", str(staged / "mkdocs.yml"))
        take_equations_from(staged / "site" / "search.json")
        shutil.rmtree(output, ignore_errors=True)
        (staged / "site").rename(output)


def run(module: str, *arguments: str) -> None:
    """Run a program of this environment."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)


def take_equations_from(index: Path) -> None:
    """Rewrite what the search looks in and shows, where no equation is set: one would stand there as LaTeX."""
    content = json.loads(index.read_text(encoding="utf-8"))
    for item in content["items"]:
        parts = _CODE.split(item["text"])
        item["text"] = "".join(part if number % 2 else _EQUATION.sub("", part) for number, part in enumerate(parts))
    index.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def stage(folder: Path, *, with_outputs: bool) -> None:
    """Write all that zensical reads: the pages into a folder, and its settings beside it."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    found, lessons = pages_and_pictures(ROOT), tutorials(ROOT, urls["Repository"], RUN if with_outputs else None)
    written = found | {lesson.source: lesson.target for lesson in lessons}
    pictures = {f"tutorials/{name}": drawn for lesson in lessons for name, drawn in lesson.pictures.items()}
    targets = written | {f"docs/{name}": name for name in (EXPLORER, *pictures)}
    texts = {source: (ROOT / source).read_text(encoding="utf-8") for source in found if source.endswith(".md")}
    texts |= {lesson.source: lesson.text for lesson in lessons}
    for source, target in written.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        if source in texts:
            text = on_the_site(texts[source], source, ROOT, targets, urls["Repository"])
            if target == "index.md":
                text = _HERO.sub(rf'<iframe class="site-explorer" src="{EXPLORER}" title="\1"></iframe>', text)
            (folder / target).write_text(text, encoding="utf-8")
        else:
            shutil.copy(ROOT / source, folder / target)
    for name, drawn in pictures.items():
        (folder / name).write_bytes(drawn)
    shutil.copytree(HERE / "assets", folder / "assets")
    settings = folder.parent / "mkdocs.yml"
    settings.write_text(yaml.safe_dump(site_settings(urls, lessons), allow_unicode=True), encoding="utf-8")


def site_settings(urls: dict[str, str], lessons: Sequence[Tutorial]) -> dict[str, Any]:
    """mkdocs.yml with the addresses of the project, the tutorials that there are, and where things lie."""
    settings: dict[str, Any] = yaml.safe_load((HERE / "mkdocs.yml").read_text(encoding="utf-8"))
    settings |= {"docs_dir": "pages", "site_dir": "site", "site_url": urls["Documentation"]}
    # A link in the footer: with zensical's own, pages would ask GitHub for the number of its stars.
    settings["extra"] = {"social": [{"icon": "simple/github", "link": urls["Repository"], "name": "Repository"}]}
    contents = ["tutorials/index.md"] if (ROOT / FOLDER / "README.md").is_file() else []
    listed = [*contents, *({lesson.title: lesson.target} for lesson in lessons)]
    sections = ({"Tutorials": listed} if "Tutorials" in section else section for section in settings["nav"])
    settings["nav"] = [section for section in sections if all(section.values())]
    (plugin,) = (plugin["mkdocstrings"] for plugin in settings["plugins"] if "mkdocstrings" in plugin)
    python = plugin["handlers"]["python"]
    python["paths"] = [str(ROOT / "src")]
    python["options"]["extensions"] = [{str(HERE / "docstring_roles.py"): {"pages": str(ROOT / "docs" / "api")}}]
    return settings


if __name__ == "__main__":
    main()
