"""Says which files of the repository are pages of the site, and makes their links lead there.

Pages are Markdown that also reads well in the repository: links in them are relative paths from file to file. On the
site a link to another page stays one, and a link to any other file leads to the repository.
"""

import os
import posixpath
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

# Pages that lie outside of docs/ or have another name there, with the name that they have on the site.
ELSEWHERE = {
    "lab/results/RESULTS.md": "results/index.md",
    "lab/results/METHOD.md": "results/method.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/tutorials/README.md": "tutorials/index.md",
}
# The folders of the report of experiments.
REPORT = ("experiments", "figures")
# Pictures beside the pages.
PICTURES = (".svg", ".png")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r'(\]\(|\b(?:src|href)=")(?!https?:|mailto:|#)([^)"#\s]+)((?:#[^)"\s]*)?)(?=[)"])')
# What marks the places that lab/benchmarks/fill_readme.py fills in.
_MARKS = re.compile(r"^<!-- /?[\w ]+ -->\n", flags=re.MULTILINE)


def pages_and_pictures(root: Path) -> dict[str, str]:
    """Each file of the site by its path in the repository: its path on the site.

    Tutorials are not among them, nor is what git ignores, such as what a tutorial has written in its folder.
    """
    found = {page: target for page, target in ELSEWHERE.items() if (root / page).is_file()}
    for folder, prefix in (("docs", ""), *((f"lab/results/{name}", f"results/{name}/") for name in REPORT)):
        for file in _files(root, folder):
            path = file.relative_to(root / folder).as_posix()
            if file.suffix in (*PICTURES, ".md"):
                found.setdefault(f"{folder}/{path}", f"{prefix}{path}")
    return found


def _files(root: Path, folder: str) -> list[Path]:
    """All files of a folder that git does not ignore; outside of a checkout, all that there are."""
    if not (root / ".git").exists():
        return sorted((root / folder).rglob("*"))
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate", "--", folder]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, encoding="utf-8").stdout
    return sorted(file for name in listed.split("\0") if name and (file := root / name).is_file())


def on_the_site(text: str, source: str, root: Path, targets: Mapping[str, str], repository: str) -> str:
    """The text of a page as the site has it.

    Args:
        text: Markdown.
        source: the page's path in the repository.
        root: the repository.
        targets: every file of the site, from its path in the repository to its path on the site.
        repository: the address of the repository, to which all other links lead.

    Raises:
        ValueError: a link to a file that does not exist.
    """
    text = _MARKS.sub("", text)
    here = posixpath.dirname(targets[source])

    def moved(match: re.Match[str]) -> str:
        before, link, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if path in targets:
            return f"{before}{os.path.relpath(targets[path], here or '.')}{anchor}"
        if not (root / path).exists():
            raise ValueError(f"{source} links to {link}, which does not exist.")
        return f"{before}{repository}/{'tree' if (root / path).is_dir() else 'blob'}/main/{path}{anchor}"

    return "".join(_LINK.sub(moved, part) if not is_code else part for is_code, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is code, in which nothing is a link."""
    for number, part in enumerate(_CODE.split(text)):
        yield number % 2 == 1, part
