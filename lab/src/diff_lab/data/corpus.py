"""Reads documents from files, Python's standard library or a data set, and divides them for training and validation."""

import codecs
import glob
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from diff_transformer.utils.files import parse_json
from diff_transformer.utils.manifest import THREADS, sha256_of
from diff_transformer.utils.suggestions import quoted, some

ENDINGS = (".txt", ".jsonl", ".parquet")

# Folders of the standard library that are not its source; generated tables would make the corpus easier than code is.
_NO_SOURCE = (
    "__pycache__ dist-packages encodings ensurepip idlelib lib2to3 pydoc_data site-packages test tests turtledemo"
)


class Corpus(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """For messages."""

    def documents(self, skip: int = 0) -> Iterator[str]:
        """Return the documents after the first `skip`; one of white space alone is empty."""

    def fingerprint(self, anew: bool = False) -> str:
        """Return a fingerprint of the content and its order; `anew` looks at them whatever is known."""


@dataclass(frozen=True)
class TextFiles:
    """Documents in files: `.txt` (a document a file), `.jsonl` (a document a line) and `.parquet` (a document a row).

    Paths are files, folders that are searched with everything below them but linked folders, or patterns such as
    "text/*.txt"; "~" is the user's folder. Other files inside a folder are left alone, and so are hidden ones. The
    files of a folder or pattern are sorted by name. None means the source files of Python's standard library.

    Raises FileNotFoundError for a path that does not exist or a pattern that matches no text, ValueError for a file of
    an unknown ending, a folder without text, or no path; reading, for a file that is not valid or lacks `field`.
    """

    paths: Sequence[str | Path] | None
    field: str = "text"  # the key of a `.jsonl` line and the column of a `.parquet` file that hold the text
    known: str | None = None  # the fingerprint, which is then not found out again

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
        return [file for path in self.paths for file in sorted(_distinct(_text_files(path)), key=by_parts)]

    def documents(self, skip: int = 0) -> Iterator[str]:
        for file in map(Path, self.files()):
            reader = _READERS[file.suffix.lower()]
            if skip and reader is _read_document:  # no need to read what is skipped
                skip -= 1
                continue
            for document in reader(file, self.field):
                if not skip:
                    yield document
                skip -= skip > 0

    def fingerprint(self, anew: bool = False) -> str:
        if self.known is not None and not anew:
            return self.known
        digest_of_all = hashlib.sha256(self.field.encode())
        with ThreadPoolExecutor(THREADS) as threads:  # of the ending and the content of each file
            for digest in threads.map(lambda file: sha256_of(file, Path(file).suffix.lower().encode()), self.files()):
                digest_of_all.update(bytes.fromhex(digest))
        return digest_of_all.hexdigest()


@dataclass(frozen=True)
class HubDataset:
    """The rows of a data set of the `datasets` library, a document a row, read as they come.

    Reading and the fingerprint raise ValueError if it cannot be loaded, and OSError if it is not found.
    """

    dataset: str  # its name on the Hub, or a folder that `datasets` can load
    config: str | None = None  # which of its configurations; None where it has one
    split: str = "train"
    field: str = "text"  # the column that holds the text
    known: str | None = None  # the fingerprint, which is then not found out again

    @property
    def name(self) -> str:
        return f"data set {self.dataset!r} ({self.split})"

    def documents(self, skip: int = 0) -> Iterator[str]:
        from datasets import load_dataset  # takes a second to import, and only this reader needs it

        rows = self._loaded(partial(load_dataset, split=self.split, streaming=True))
        for number, row in enumerate(rows.skip(skip), start=skip + 1):
            location = f"Row {number} of the {self.name}"
            if self.field not in row:
                raise ValueError(f"{location} has no column {self.field!r}, only {some(map(quoted, row))}.")
            yield _row(row[self.field], location, self.field)

    def fingerprint(self, anew: bool = False) -> str:
        from datasets import load_dataset_builder

        if self.known is not None and not anew:
            return self.known
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
    named = os.path.expanduser(path)
    matches = [named] if os.path.exists(named) else glob.glob(named, recursive=True)
    if not matches:
        raise FileNotFoundError(f"There is no text file or folder {quoted(named, 300)}.")
    inside = (file for match in matches for file in ([match] if os.path.isfile(match) else _in_folder(match)))
    is_empty = True
    for file in inside:
        if os.path.splitext(file)[1].lower() in ENDINGS and os.path.isfile(file):  # no link to nowhere
            is_empty = False
            yield file
    if is_empty:
        raise ValueError(f"There is no text in {named!r}: a text file ends in {', '.join(ENDINGS)}.")


def _distinct(files: Iterable[str]) -> Iterable[str]:
    """Return each file by its shortest path: a pattern follows links to folders, in circles too."""
    real = cache(os.path.realpath)
    by_length = sorted(files, key=lambda file: (len(file), file), reverse=True)
    return {(real(os.path.dirname(file)), os.path.basename(file)): file for file in by_length}.values()


def _in_folder(path: str) -> Iterator[str]:
    """Yield the files in a folder and those below it, without those that are hidden."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, inside, names in os.walk(path, onerror=refuse):
        inside[:] = [name for name in inside if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _read_document(file: Path, field: str) -> Iterator[str]:
    try:
        # Source honours the encoding that the file declares.
        with tokenize.open(file) if file.suffix.lower() == ".py" else file.open(encoding="utf-8-sig") as stream:
            yield _or_empty(stream.read())
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8 text: {error.reason} at byte {error.start}.") from None


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            location = f"Line {number} of {str(file)!r}"
            row = parse_json(line, location)
            if not isinstance(row, dict) or field not in row:
                holds = f"only {some(map(quoted, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
                raise ValueError(f"{location} has no field {field!r}, {holds}.")
            yield _row(row[field], location, field)


def _read_parquet(file: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowException, parquet  # `datasets` brings it

    try:
        with parquet.ParquetFile(file) as table:
            columns = table.schema_arrow.names
            if field not in columns:
                raise ValueError(f"{str(file)!r} has no column {field!r}, only {some(map(quoted, columns))}.")
            batches = table.iter_batches(batch_size=64, columns=[field])
            for number, value in enumerate((value for batch in batches for value in batch.column(0)), start=1):
                yield _row(value.as_py(), f"Row {number} of {str(file)!r}", field)
    except (ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{str(file)!r} is not a readable parquet file: {message}") from None


def _row(text: object, location: str, field: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{location}: {field!r} is {quoted(text)}, not text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        half = error.object[error.start]
        raise ValueError(f"{location}: {field!r} holds {half!r}, which is not a Unicode character.") from None
    return _or_empty(text)


def _or_empty(text: str) -> str:
    return "" if text.isspace() else text


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".txt": _read_document,
    ".py": _read_document,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}

SPLIT_VERSION = 2  # of the rule below, in the names of what is made by it

# What is known of each document: bytes of UTF-8, and the first 64 bits of the SHA-256 of its text.
DOCUMENT = np.dtype([("bytes", "<i8"), ("digest", "<u8")])


def document_row(text: str) -> tuple[int, int]:
    """Return the fields of `DOCUMENT` for a text."""
    encoded = text.encode()
    return len(encoded), int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little")


def split(documents: np.ndarray, validation_fraction: float) -> np.ndarray:
    """Return how many bytes of each document, from its beginning, are for training: (documents,) int64.

    It depends on the documents' content alone: there is no seed, and the order does not matter. Documents are ranked by
    their digest; the first ones are for validation as long as they fit into `validation_fraction` of all bytes. If that
    is less than half of the fraction (few documents, or long ones), others follow that still fit. If it still is less
    than half, the end of the longest document for training follows. Copies of a document are treated alike. Raises
    ValueError if there is no text.
    """
    sizes = documents["bytes"]
    if not len(documents) or not sizes.any():
        raise ValueError("There is no text to divide into training and validation.")
    if validation_fraction == 1:
        return np.zeros_like(sizes)
    # Ranked, with all copies of a document as one.
    _, first, number, copies = np.unique(
        documents["digest"], return_index=True, return_inverse=True, return_counts=True
    )
    together = sizes[first] * copies
    wanted = validation_fraction * int(sizes.sum())
    held_out = np.cumsum(together) <= wanted
    held = int(together[held_out].sum())
    if held < wanted / 2:
        for later in np.flatnonzero(~held_out):
            if held + together[later] <= wanted:
                held_out[later] = True
                held += int(together[later])
    training = np.where(held_out, 0, sizes[first])
    if held < wanted / 2:
        longest = np.argmax(training)
        training[longest] -= max(1, round((wanted - held) / int(copies[longest])))
    return training[number]


def _part(corpus: Corpus, validation_fraction: float, *, validation: bool) -> Iterator[str]:
    rows = np.array([document_row(text) for text in corpus.documents()], dtype=DOCUMENT)
    for text, boundary in zip(corpus.documents(), split(rows, validation_fraction), strict=True):
        encoded = text.encode()
        # Of a character that is cut, neither side has anything.
        if part := encoded[boundary:] if validation else encoded[:boundary]:
            yield part.decode(errors="ignore")


# The text to train on and the text to validate with, document by document; the corpus is read twice. See `split`.
training_text = partial(_part, validation=False)
validation_text = partial(_part, validation=True)
