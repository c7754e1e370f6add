"""Makes pages of the tutorials, which are notebooks kept as text (jupytext, py:percent) in docs/tutorials."""

import base64
import functools
import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = "docs/tutorials"
# A tutorial takes three minutes at most where nothing else runs.
TIMEOUT = 1800
# What a cell's output is shown as: the first of these that it has.
_PICTURES = {"image/svg+xml": "svg", "image/png": "png"}
# The tag of a cell that is not run where a package does not load: needs-timm.
_NEEDS = "needs-"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Tutorial:
    """A tutorial as a page.

    Attributes:
        source: its path in the repository.
        title: its first heading.
        text: the page, in Markdown.
        pictures: what its cells draw, by file name; the page shows them.
    """

    source: str
    title: str
    text: str
    pictures: dict[str, bytes] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Its path on the site."""
        return f"tutorials/{page_name(self.source)}.md"


def page_name(source: str) -> str:
    """The name of a tutorial's page, with hyphens as in those of other pages."""
    return Path(source).stem.replace("_", "-")


def tutorials(root: Path, repository: str, run: Path | None) -> list[Tutorial]:
    """All tutorials, in the order in which the folder's README.md names them; those that it does not name come last.

    Args:
        root: the repository.
        repository: its address, where a reader finds the notebook.
        run: folder of tutorials that have been run; those that have changed are run again. None: none is run, and
            pages show code without its outputs.
    """
    contents = root / FOLDER / "README.md"
    named = re.findall(r"\(([\w-]+\.py)\)", contents.read_text(encoding="utf-8")) if contents.is_file() else []
    place = {name: number for number, name in enumerate(named)}
    files = sorted((root / FOLDER).glob("*.py"), key=lambda file: (place.get(file.name, len(place)), file.name))
    return [read_tutorial(file, root, repository, run) for file in files]


def read_tutorial(file: Path, root: Path, repository: str, run: Path | None) -> Tutorial:
    """A tutorial's file as a page: cells of text as they are, cells of code as blocks with what they print and draw.

    Raises:
        ValueError: a tutorial does not begin with a heading.
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    source = file.relative_to(root).as_posix()
    notebook = jupytext.read(file, fmt="py:percent") if run is None else executed(file, run)
    parts, pictures = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source.strip())
            continue
        code = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%")).strip()
        if code:
            parts.append(f"```python\n{code}\n```")
        for output, (text, picture) in enumerate(map(_shown, cell.get("outputs", ()))):
            if picture is None:
                parts.append(f"```text\n{text.rstrip()}\n```" if text.strip() else "")
            else:
                name = f"{page_name(source)}-{number}-{output}.{text}"
                pictures[name] = picture
                parts.append(f"![What the code above draws]({name})")
    first, _, rest = "\n\n".join(filter(None, parts)).partition("\n\n")
    if not first.startswith("# "):
        raise ValueError(f"{source} must begin with a heading, got {first[:60]!r}.")
    note = f"*A notebook: [{file.name}]({repository}/blob/main/{source}) opens in Jupyter with jupytext.*"
    return Tutorial(source, first.removeprefix("# ").strip(), f"{first}\n\n{note}\n\n{rest}\n", pictures)


def executed(file: Path, folder: Path) -> Any:
    """The notebook of a tutorial with its outputs, run now unless the folder has those of the same text.

    It is run in a copy of its place that has what lies around the tutorials, so that it writes nothing among them.
    """
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    finished = folder / f"{file.stem}-{digest}.ipynb"
    if not finished.is_file():
        notebook = jupytext.read(file, fmt="py:percent")
        for cell in notebook.cells:
            tags = cell.metadata.get("tags", [])
            if not all(_loads(tag.removeprefix(_NEEDS)) for tag in tags if tag.startswith(_NEEDS)):
                cell.metadata["tags"] = [*tags, "skip-execution"]
        root = file.parents[2]
        with tempfile.TemporaryDirectory() as copy:
            for name in ("lab", "examples"):
                (Path(copy) / name).symlink_to(root / name)
            place = Path(copy) / FOLDER
            place.mkdir(parents=True)
            resources = {"metadata": {"path": str(place)}}
            NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = finished.with_suffix(".unfinished")
        nbformat.write(notebook, unfinished)
        unfinished.rename(finished)
    return nbformat.read(finished, as_version=4)


@functools.cache
def _loads(package: str) -> bool:
    """Whether a package can be imported here, which its being installed does not tell."""
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


def _shown(output: Any) -> tuple[str, bytes | None]:
    """An output as its text and nothing, or as the ending of a picture's file and the picture; of stderr nothing."""
    if output.output_type == "stream":
        return _COLOUR.sub("", output.text) if output.name == "stdout" else "", None
    for kind, ending in _PICTURES.items():
        if kind in output.data:
            drawn = output.data[kind]
            return ending, drawn.encode() if ending == "svg" else base64.b64decode(drawn)
    return _COLOUR.sub("", output.data["text/plain"]), None
