"""Text in: documents from the user's own files, or from the source of Python's standard library."""

import glob
import json
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ENDINGS = (".txt", ".jsonl", ".parquet")

# Folders of the standard library that are not its source: tests, installed packages, caches, bundled programs, and
# two folders of generated tables (`encodings`, `pydoc_data`) that would make the corpus easier than code is.
_NOT_SOURCE = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def load_text(paths: Sequence[str | Path] | None, *, field: str = "text") -> list[str]:
    """Read documents.

    Args:
        paths: files, or folders that are searched with everything below them: `.txt` (a document a file), `.jsonl`
            (a document a line) and `.parquet` (a document a row). Other files inside a folder are left alone.
            None means the source files of Python's standard library, a document a file.
        field: the key of a `.jsonl` line and the column of a `.parquet` file that hold the text.

    Returns:
        The documents that are not empty, in the order of `paths`; the files of a folder are sorted by name.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file has an unknown ending, is not valid or lacks `field`; a folder holds no text; all is empty.
    """
    if paths is None:
        documents = list(_standard_library())
        source = "Python's standard library"
    else:
        files = [file for path in paths for file in _text_files(Path(path))]
        documents = [document for file in files for document in _read(file, field)]
        source = ", ".join(str(path) for path in paths) or "an empty list of paths"
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError(f"The corpus is empty: {source} holds no text.")
    return documents


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    for file in sorted(files, key=lambda file: file.as_posix()):
        if _NOT_SOURCE.isdisjoint(file.parts[:-1]):
            with tokenize.open(root / file) as stream:  # honours the file's declared encoding
                yield stream.read()


def _text_files(path: Path) -> list[Path]:
    """The readable files that `path` names: itself, or everything below it."""
    if not path.exists():
        raise FileNotFoundError(f"There is no text file or folder {str(path)!r}.")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
        if not files:
            raise ValueError(f"The folder {str(path)!r} holds no file that ends in {', '.join(ENDINGS)}.")
        return files
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"Cannot read {str(path)!r}: a text file ends in {', '.join(ENDINGS)}.")
    return [path]


def _read(file: Path, field: str) -> Iterator[str]:
    reader = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[file.suffix.lower()]
    try:
        yield from reader(file, field)
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _read_txt(file: Path, field: str) -> Iterator[str]:
    yield file.read_text(encoding="utf-8")


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    # The json module rather than `datasets`: the error can name the line, and nothing is copied into a cache.
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"Line {number} of {str(file)!r} is not JSON: {error.msg}.") from None
            if not isinstance(row, dict) or field not in row:
                found = f"only {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f"Line {number} of {str(file)!r} has no field {field!r}, {found}.")
            if not isinstance(row[field], str):
                raise ValueError(f"Line {number} of {str(file)!r}: {field!r} is {row[field]!r}, not text.")
            try:
                row[field].encode()
            except UnicodeEncodeError as error:  # JSON can write half of a pair, which is no character
                half = error.object[error.start]
                raise ValueError(
                    f"Line {number} of {str(file)!r}: {field!r} holds {half!r}, which is not a Unicode character."
                ) from None
            yield row[field]


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    from datasets import load_dataset  # takes a second to import, and only this reader needs it
    from pyarrow import ArrowException, parquet  # `datasets` brings it

    try:
        # First the table of contents: of a bad file `datasets` prints a line, and it fails on one without rows.
        contents = parquet.read_metadata(file)
        columns = contents.schema.to_arrow_schema().names
        if field not in columns:
            raise ValueError(f"{str(file)!r} has no column {field!r}, only {', '.join(map(repr, columns))}.")
        if contents.num_rows == 0:
            return
        # Streaming reads the file where it lies; the default would first copy it into the user's cache.
        rows = load_dataset("parquet", data_files=glob.escape(str(file)), split="train", streaming=True)
        for number, row in enumerate(rows.select_columns(field), start=1):
            if not isinstance(row[field], str):
                raise ValueError(f"Row {number} of {str(file)!r}: {field!r} is {row[field]!r}, not text.")
            yield row[field]
    except (ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{str(file)!r} is not a readable parquet file: {message}") from None
