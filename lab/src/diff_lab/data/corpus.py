"""Reads documents a piece at a time: from files, Python's standard library, or a data set of the `datasets` library."""

import codecs
import glob
import hashlib
import heapq
import itertools
import os
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from diff_transformer.utils.files import parse_json
from diff_transformer.utils.manifest import file_digests
from diff_transformer.utils.suggestions import quoted, some

ENDINGS = (".txt", ".jsonl", ".parquet")

# Characters of a long document that are read at a time, and how many more to look for where it can be cut.
PIECE = 1 << 18
_LONGEST_PIECE = 16 * PIECE
_SEARCHED = 1 << 30  # bytes that are read for files that are not UTF-8 either, after the first

# Before white space that follows something else: byte-level tokenizers never join the two, so the pieces' tokens are
# those of the document.
_CUT = re.compile(r"\S(?=\s)")

# Folders of the standard library that are not its source: tests, installed packages, caches, bundled programs, and
# two folders of generated tables (`encodings`, `pydoc_data`) that would make the corpus easier than code is.
_NO_SOURCE = (
    "__pycache__ dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages test tests turtledemo"
)


class Piece(NamedTuple):
    """A part of a document that fits in memory."""

    text: str  # all of it has bytes: no half of a surrogate pair; empty for a document of white space
    ends: bool  # whether the document ends with it


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """For messages."""

    def pieces(self, skip: int = 0) -> Iterator[Piece]:
        """Return the documents after the first `skip`, empty ones included, in pieces."""

    def fingerprint(self) -> str:
        """Return a fingerprint of the content: the same documents in the same order give the same one."""


@dataclass(frozen=True)
class TextFiles:
    """Documents in files.

    Args:
        paths: files, or folders that are searched with everything below them, linked folders included: `.txt` (a
            document a file), `.jsonl` (a document a line) and `.parquet` (a document a row). Other files inside a
            folder are left alone, and so are hidden ones, whose names begin with a dot; the files of a folder are
            sorted by name. "~" is the user's folder, and a name that is not there may be a pattern, such as
            "text/*.txt" or "text/**/*.txt", which is read like a folder of its matches. None means the source files of
            Python's standard library, a document a file.
        field: the key of a `.jsonl` line and the column of a `.parquet` file that hold the text.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern matches no text.
        ValueError: a file has an unknown ending, a folder holds no text, or nothing is named. Reading raises it for a
            file that is not valid or lacks `field`.
    """

    paths: Sequence[str | Path] | None
    field: str = "text"

    def __post_init__(self) -> None:
        for path in self.paths or ():
            next(_text_files(path))  # looking for the first file is quick where there are many
        if self.paths is not None and not self.paths:
            raise ValueError("The corpus is empty: no file or folder of text is named.")

    @property
    def name(self) -> str:
        if self.paths is None:
            return "Python's standard library"
        return ", ".join(str(path) for path in self.paths)

    def files(self) -> list[str]:
        """Return the files' paths, in the order of the documents."""
        if self.paths is None:
            return [str(file) for file in _standard_library()]
        # By the parts of their paths: a folder's files stand together, before those of "folder b" after "folder".
        by_parts = partial(str.split, sep=os.sep)
        return [file for path in self.paths for file in sorted(_text_files(path), key=by_parts)]

    def pieces(self, skip: int = 0) -> Iterator[Piece]:
        files = [Path(file) for file in self.files()]
        for number, file in enumerate(files):
            reader = _READERS[file.suffix.lower()]
            if skip and reader is _read_document:  # no need to read what is skipped
                skip -= 1
                continue
            try:
                for piece in reader(file, self.field):
                    if not skip:
                        yield piece
                    skip -= skip > 0 and piece.ends
            except UnicodeDecodeError as error:
                raise ValueError(_not_utf8(files[number:], error)) from None

    def fingerprint(self) -> str:
        """Hash the content, see `Corpus`."""
        digest_of_all = hashlib.sha256(self.field.encode())
        here = os.getcwd()
        files = [os.path.join(here, file) for file in self.files()]
        for digest in file_digests(files):
            digest_of_all.update(bytes.fromhex(digest))
        return digest_of_all.hexdigest()


@dataclass(frozen=True)
class Fingerprinted:
    """A corpus whose fingerprint is known, which no process has to find out again."""

    corpus: Corpus
    known: str

    @property
    def name(self) -> str:
        return self.corpus.name

    def pieces(self, skip: int = 0) -> Iterator[Piece]:
        return self.corpus.pieces(skip)

    def fingerprint(self) -> str:
        return self.known


@dataclass(frozen=True)
class HubDataset:
    """The rows of a data set of the `datasets` library, a document a row, read as they come.

    Reading and the fingerprint raise ValueError if it cannot be loaded, and OSError if it is not found.
    """

    dataset: str  # its name on the Hub, or a folder that `datasets` can load
    config: str | None = None  # which of its configurations; None where it has one
    split: str = "train"
    field: str = "text"  # the column that holds the text

    @property
    def name(self) -> str:
        return f"data set {self.dataset!r} ({self.split})"

    def pieces(self, skip: int = 0) -> Iterator[Piece]:
        from datasets import load_dataset  # takes a second to import, and only this reader needs it

        rows = self._loaded(partial(load_dataset, split=self.split, streaming=True))
        if rows.column_names is not None and self.field not in rows.column_names:
            raise ValueError(
                f"The {self.name} has no column {self.field!r}, only {some(map(quoted, rows.column_names))}."
            )
        for number, row in enumerate(rows.skip(skip), start=skip + 1):
            location = f"Row {number} of the {self.name}"
            if self.field not in row:  # the columns were not known before
                raise ValueError(f"{location} has no column {self.field!r}, only {some(map(quoted, row))}.")
            yield from _row(row[self.field], location, self.field)

    def fingerprint(self) -> str:
        from datasets import load_dataset_builder

        builder = self._loaded(load_dataset_builder)
        # The hash is of the data files' versions on the Hub, or of their names and times in a folder.
        parts = (self.dataset, builder.config_id, str(builder.hash), self.split, self.field)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _loaded(self, load: Callable[..., Any]) -> Any:
        """Load by a function of `datasets`; its errors become sentences that name the settings of the recipe."""
        try:
            return load(self.dataset, self.config)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"data.dataset={self.dataset!r}, data.dataset_config={self.config!r} and "
                f"data.dataset_split={self.split!r} name no text that can be loaded: {' '.join(str(error).split())}"
            ) from None


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    chosen = [file for file in files if not set(_NO_SOURCE.split()) & set(file.parts[:-1])]
    return [root / file for file in sorted(chosen, key=lambda file: file.as_posix())]


def _text_files(path: str | Path) -> Iterator[str]:
    """Yield the readable files of `path`, in any order; as strings, to find a million files in seconds."""
    named = str(Path(os.path.expanduser(path)))
    endings = ", ".join(ENDINGS)
    found: Iterable[str]
    missing: Exception
    if os.path.isdir(named):
        found, missing = _in_folder(named), ValueError(f"The folder {named!r} holds no file that ends in {endings}.")
    elif os.path.exists(named):
        found, missing = filter(_is_text, [named]), ValueError(f"Cannot read {named!r}: a text file ends in {endings}.")
    elif glob.escape(named) != named:
        matches = glob.glob(named, recursive=True)
        inside = [file for match in matches for file in (_in_folder(match) if os.path.isdir(match) else [match])]
        texts = sorted(file for file in inside if _is_text(file) and os.path.isfile(file))
        # "**" matches a folder and each file in it, and goes through links to folders, be it in circles.
        found = {(os.path.realpath(os.path.dirname(file)), os.path.basename(file)): file for file in texts}.values()
        missing = FileNotFoundError(f"The pattern {named!r} matches no file that ends in {endings}.")
    else:
        found, missing = (), FileNotFoundError(f"There is no text file or folder {quoted(named, 300)}.")
    first = next(files := iter(found), None)
    if first is None:
        raise missing
    yield first
    yield from files


def _is_text(file: str) -> bool:
    return os.path.splitext(file)[1].lower() in ENDINGS


def _in_folder(path: str) -> Iterator[str]:
    """Yield the readable files in a folder and those below it, in any order, without those that are hidden."""
    folders = [path]
    links: list[str] = []  # to folders; after all others, in order: which name a folder is found by is always the same
    seen = set()
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        if (place := os.path.realpath(folder)) in seen:  # linked from two places, or from inside itself
            continue
        seen.add(place)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):  # what editors, systems and version control keep beside a text
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_symlink() and os.path.isdir(entry.path):
                    heapq.heappush(links, entry.path)
                elif _is_text(entry.name) and entry.is_file():
                    yield entry.path


def _not_utf8(files: list[Path], error: UnicodeDecodeError) -> str:
    """Describe files that are not UTF-8: the first, whose error is given, and others within ``_SEARCHED``."""
    others = [file for file in files[1:] if file.suffix.lower() not in (".parquet", ".py")]  # source may say its own
    sizes = itertools.accumulate(file.stat().st_size for file in others)
    found = [(file, _undecodable(file)) for file, size in zip(others, sizes, strict=False) if size <= _SEARCHED]
    wrong = [(files[0], _undecodable(files[0]) or error.reason), *((file, reason) for file, reason in found if reason)]
    if len(wrong) == 1:
        return f"{str(files[0])!r} is not UTF-8 text: {wrong[0][1]}."
    named = some([f"{str(file)!r} ({reason})" for file, reason in wrong], most=5)
    return f"{len(wrong)} files are not UTF-8 text: {named}."


def _undecodable(file: Path) -> str | None:
    """Return the place and the reason if a file is not UTF-8, with a part of it in memory at a time."""
    done, held = 0, b""
    with file.open("rb") as stream:
        while True:
            held += (more := stream.read(PIECE))
            try:
                _, used = codecs.utf_8_decode(held, "strict", not more)
            except UnicodeDecodeError as error:
                return f"{error.reason} at byte {done + error.start}"
            if not more:
                return None
            done, held = done + used, held[used:]


def _read_document(file: Path, field: str) -> Iterator[Piece]:
    # Source honours the encoding that the file declares.
    with tokenize.open(file) if file.suffix.lower() == ".py" else file.open(encoding="utf-8-sig") as stream:
        yield from _pieces(iter(partial(stream.read, PIECE), ""))


def _pieces(parts: Iterator[str]) -> Iterator[Piece]:
    """Yield the pieces of a document that comes in parts, about as long as the parts."""
    held = next(parts, "")
    blank = not held.strip()
    for more in parts:
        held += more
        blank = blank and not more.strip()
        cut = 0 if blank else _last_cut(held)
        if cut:
            yield Piece(held[:cut], ends=False)
            held = held[cut:]
    yield Piece("" if blank else held, ends=True)


def _last_cut(text: str) -> int:
    """Return the last place to cut that changes no token, or the end of a text that grew too long; 0 for nowhere."""
    for width in (1 << 12, 2 * PIECE + 1):  # what lies before was searched when it was read
        cuts = [match.end() for match in _CUT.finditer(text, max(0, len(text) - width))]
        if cuts:
            return cuts[-1]
    return len(text) if len(text) >= _LONGEST_PIECE else 0


def _read_jsonl(file: Path, field: str) -> Iterator[Piece]:
    # The json module rather than `datasets`: the error can name the line, and nothing is copied into a cache.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            location = f"Line {number} of {str(file)!r}"
            row = parse_json(line, location)
            if not isinstance(row, dict) or field not in row:
                holds = f"only {some(map(quoted, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f"{location} has no field {field!r}, {holds}.")
            yield from _row(row[field], location, field)


def _read_parquet(file: Path, field: str) -> Iterator[Piece]:
    from pyarrow import ArrowException, parquet  # `datasets` brings it

    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if field not in columns:
                raise ValueError(f"{str(file)!r} has no column {field!r}, only {some(map(quoted, columns))}.")
            batches = table.iter_batches(batch_size=64, columns=[field])
            for number, value in enumerate((value for batch in batches for value in batch.column(0)), start=1):
                yield from _row(value.as_py(), f"Row {number} of {str(file)!r}", field)
    except (ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{str(file)!r} is not a readable parquet file: {message}") from None


def _row(text: object, location: str, field: str) -> Iterator[Piece]:
    """Cut a document of a table like that of a file, as encoding takes a hundred times a text's memory."""
    if not isinstance(text, str):
        raise ValueError(f"{location}: {field!r} is {quoted(text)}, not text.")
    check_characters(text, f"{location}: {field!r}")
    return _pieces(text[start : start + PIECE] for start in range(0, len(text), PIECE))


def check_characters(text: str, location: str) -> None:
    """Raise ValueError if a text has no bytes: JSON and Python's strings can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{location} holds {half!r}, which is not a Unicode character.") from None


_READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".txt": _read_document,
    ".py": _read_document,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
