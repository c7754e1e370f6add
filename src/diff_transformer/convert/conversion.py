"""Converts the folder of a model from or to the layout of another project."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file

from diff_transformer._version import __version__
from diff_transformer.convert.layout import CONFIG, INDEX, Layout, Weights, plan, read_source_config
from diff_transformer.convert.layout_tables import LAYOUTS, read_config, write_settings
from diff_transformer.convert.phi4flash_attention import PHI4FLASH, WHAT_IS_COVERED
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.model.remote_code import code_files
from diff_transformer.utils.files import atomic_file, commit, free_bytes, read_json, refuse_existing, unfinished_path
from diff_transformer.utils.suggestions import quoted

MAX_SHARD_SIZE = "5GB"
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(|KB|MB|GB|TB)")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Files that go along unchanged.
CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)

# Called with the bytes of weights that are done, and all.
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: its folder, tensors, bytes of weights, files of weights, and attention type.

    Examples:
        >>> Converted(Path("ours"), tensors=11, bytes=4096, shards=1, attention_type="diff").shards
        1
    """

    folder: Path
    tensors: int
    bytes: int
    shards: int
    attention_type: str


def convert_from(
    layout: str,
    source: str | Path,
    target: str | Path,
    *,
    attention_type: str | None = None,
    dex_heads: Sequence[Sequence[int]] | None = None,
    dex_lambda_start: float | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Converted:
    """Write somebody else's checkpoint as one of ours.

    Everything is checked from the headers before anything is written. The weights keep their dtype; tokenizer and
    generation settings go along. ``target`` appears when all of it is there; an interrupted conversion resumes when it
    is called again.

    Args:
        layout: "microsoft", "microsoft-v2", "diffllama", "llama", "motif" or "motif-2".
        source: the folder with config.json and safetensors.
        target: the folder to make.
        attention_type: of the new model, if its layout leaves a choice: a "llama" becomes a "softmax", or a "diff_v2"
            or "dex" that computes the same.
        dex_heads, dex_lambda_start: of a "dex", as :class:`DiffTransformerConfig` has them.
        max_shard_size: most bytes of weights in a file, as a number or like "5GB"; so much memory is needed.
        progress: called with bytes done and bytes in all.

    Raises:
        ValueError: the folder does not fit the layout; one sentence lists every mismatch.
        FileNotFoundError: there is no such folder, or no weights in it.
        FileExistsError: ``target`` exists.
        OSError: the disk is full.

    Examples:
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> transformers.LlamaForCausalLM(config).save_pretrained("llama")
        >>> convert_from("llama", "llama", "ours", attention_type="diff_v2").attention_type
        'diff_v2'
    """
    source, target, largest = Path(source), Path(target), shard_bytes(max_shard_size)
    choices = _layouts(layout)
    chosen = choices.get(attention_type or next(iter(choices)))
    if chosen is None:
        allowed = " or ".join(map(repr, choices))
        raise ValueError(f"A checkpoint in the layout {layout!r} can become {allowed}, not {attention_type!r}.")
    raw = read_source_config(source)
    with _single_line_errors(f"{str(source / CONFIG)!r} cannot be converted: "):
        config = chosen.read(raw)
    if dex_heads is not None or dex_lambda_start is not None:
        if not config.spec.corrects_heads:
            raise ValueError(
                f"dex_heads and dex_lambda_start belong to the attention type 'dex', not to {config.attention_type!r}."
            )
        dex = {"dex_heads": dex_heads and [list(heads) for heads in dex_heads], "dex_lambda_start": dex_lambda_start}
        with _single_line_errors():
            config = DiffTransformerConfig.from_dict(config.to_dict() | dex)
    config.architectures = ["DiffTransformerForCausalLM"]
    settings = json.loads(config.to_json_string())
    return _Job(chosen, source, target, config, settings, largest, backwards=False).run(progress)


def convert_to(
    layout: str,
    source: str | Path,
    target: str | Path,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Converted:
    """Write one of our checkpoints in somebody else's layout.

    Args and errors: as :func:`convert_from`; a ValueError also says why that layout cannot hold the model.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForCausalLM(config).save_pretrained("model")
        >>> convert_to("diffllama", "model", "diffllama").shards
        1
    """
    source, target, largest = Path(source), Path(target), shard_bytes(max_shard_size)
    choices = _layouts(layout)
    raw = read_source_config(source)
    with _single_line_errors(f"{str(source / CONFIG)!r} cannot be converted: "):
        config = read_config(raw, DiffTransformerConfig)
    chosen = choices.get(config.attention_type)
    if chosen is None or chosen.write is None:
        holds = " or ".join(repr(kind) for kind, choice in choices.items() if choice.write is not None)
        raise ValueError(
            f"The layout {layout!r} has one kind of attention, our {holds}, and no place for the other weights of a "
            f"{config.attention_type!r} model like {str(source)!r}."
        )
    with _single_line_errors(f"{str(source / CONFIG)!r} cannot be converted: "):
        settings = write_settings(chosen, config)
    return _Job(chosen, source, target, config, settings, largest, backwards=True).run(progress)


class ResumableDirectory:
    """The files of a folder to be, in a sibling ``.unfinished-NAME``, until the folder gets its name at the end.

    A file has its name only when it is complete, so a file that is present is never made again. Files that an
    interrupted job left are used only if it was the same ``job``: inputs and outputs, as JSON can hold them. If the
    folder exists, FileExistsError is raised.
    """

    def __init__(self, target: Path, job: Mapping[str, Any]) -> None:
        self.target, self.job = target, dict(job)
        self._sibling = unfinished_path(target)
        self._files, self._job_file = self._sibling / "files", self._sibling / "job.json"
        refuse_existing(target)

    def finished(self) -> set[str]:
        """Return the names of the files that an interrupted job like this one has left."""
        return {file.name for file in self._files.iterdir()} if self._is_same_job() else set()

    @contextmanager
    def started(self) -> Iterator[set[str]]:
        """Resume an interrupted job like this one, or begin anew; no other process makes the folder meanwhile.

        Yields the names of the files that are present. Raises FileExistsError if another process is making this
        folder, or has made it.
        """
        self._sibling.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self._sibling / "lock").acquire(blocking=False)  # a process that ends loses it
        except Timeout:
            raise FileExistsError(
                f"{str(self.target)!r} is being made by another process; wait for it, or name another folder."
            ) from None
        with lock:
            refuse_existing(self.target)
            if not self._is_same_job():
                self._job_file.unlink(missing_ok=True)  # first, or it would speak for files that are gone
                shutil.rmtree(self._files, ignore_errors=True)
                self._files.mkdir()
                self._job_file.write_text(json.dumps(self.job), encoding="utf-8")
            yield self.finished()
        shutil.rmtree(self._sibling)

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        """Make a file of the folder, or of a folder in it, complete or not at all; `fill` writes it at a path."""
        try:
            (self._files / name).parent.mkdir(exist_ok=True)
            with atomic_file(self._files / name) as unfinished:
                fill(unfinished)
        except (OSError, SafetensorError) as error:  # the latter is what safetensors makes of a full disk
            reason = str(error).rstrip(".")
            raise OSError(
                f"{name} could not be written ({reason}); the finished files stay in {str(self._sibling)!r}, and the "
                "same command resumes."
            ) from error

    def finish(self) -> None:
        """Give the folder its name."""
        commit(self._files, self.target)

    def _is_same_job(self) -> bool:
        try:
            is_same = read_json(self._job_file) == self.job
        except (OSError, ValueError):  # there is none, or its writing was interrupted
            return False
        return is_same and self._files.is_dir()  # without, it has its name already, and what is left was not removed


class _Job:
    """A conversion that has been checked; nothing is written yet."""

    def __init__(
        self,
        layout: Layout,
        source: Path,
        target: Path,
        config: DiffTransformerConfig,
        settings: dict[str, Any],
        max_shard_size: int,
        backwards: bool,
    ) -> None:
        refuse_existing(target)
        self.weights = Weights(source)
        try:
            outputs = plan(layout, config, self.weights.headers, backwards=backwards)
        except ValueError as error:
            side = "ours" if backwards else repr(layout.name)
            raise ValueError(f"The weights in {str(source)!r} do not fit the layout {side}: {error}") from None
        self.outputs = {output.key: output for output in outputs}
        self.settings, self.attention_type = settings, config.attention_type
        self.split = split_state_dict_into_shards_factory(
            self.outputs,
            get_storage_size=lambda output: output.bytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self.shards = self.split.filename_to_tensors
        self.sizes = {name: sum(self.outputs[key].bytes for key in keys) for name, keys in self.shards.items()}
        self.total = sum(self.sizes.values())
        carried = {file for pattern in CARRIED for file in source.glob(pattern) if file.is_file()}
        self.carried = {file.relative_to(source).as_posix(): file for file in sorted(carried)}
        self.folder = ResumableDirectory(target, self._identity())

    def run(self, progress: Progress | None) -> Converted:
        needed, free = self.total - self._done(self.folder.finished()), free_bytes(self.folder.target)
        if needed > free:
            raise OSError(
                f"The disk of {str(self.folder.target)!r} has {free:,} bytes free, and the converted weights need "
                f"{needed:,}."
            )
        report = progress or (lambda done, total: None)
        with self.folder.started() as finished:
            done = self._done(finished)
            report(done, self.total)
            for name, keys in self.shards.items():
                if name not in finished:
                    self.folder.write(name, partial(self._save, keys))
                    done += self.sizes[name]
                    report(done, self.total)
            for name, text in self._texts().items():
                self.folder.write(name, partial(Path.write_text, data=text, encoding="utf-8"))
            for name, original in self.carried.items():
                self.folder.write(name, partial(shutil.copyfile, original))
            self.folder.finish()
        return Converted(self.folder.target, len(self.outputs), self.total, len(self.shards), self.attention_type)

    def _done(self, finished: set[str]) -> int:
        return sum(size for name, size in self.sizes.items() if name in finished)

    def _save(self, keys: list[str], file: Path) -> None:
        tensors = {}
        for key in keys:
            output = self.outputs[key]
            tensors[key] = output.make(*map(self.weights.read, output.inputs)).contiguous()
            assert (tensors[key].shape, tensors[key].dtype) == (output.shape, output.dtype)
        save_file(tensors, file, metadata={"format": "pt"})

    def _texts(self) -> dict[str, str]:
        texts = {CONFIG: json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n"}
        if "auto_map" in self.settings:
            texts |= code_files()
        if self.split.is_sharded:
            index = {"metadata": self.split.metadata, "weight_map": self.split.tensor_to_filename}
            texts[INDEX] = json.dumps(index, indent=2) + "\n"
        return texts

    def _identity(self) -> dict[str, Any]:
        """Return the part that an interrupted job must share with this one: the files read, and all that is written."""
        files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self.weights.files]
        tensors = [[key, list(output.inputs)] for key, output in self.outputs.items()]
        identity = {"version": __version__, "source": files, "settings": self.settings, "tensors": tensors}
        return json.loads(json.dumps({**identity, "shards": self.shards, "beside": list(self.carried)}))


def _layouts(name: str) -> dict[str, Layout]:
    if name == PHI4FLASH:
        raise ValueError(WHAT_IS_COVERED)
    if name not in LAYOUTS:
        raise ValueError(f"The layout must be one of {', '.join(map(repr, LAYOUTS))}, got {name!r}.")
    return LAYOUTS[name]


@contextmanager
def _single_line_errors(prefix: str = "") -> Iterator[None]:
    """Turn a configuration class's error about settings into a ValueError in one line."""
    try:
        yield
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(prefix + " ".join(str(error).split())) from None
    except ZeroDivisionError:  # how transformers takes a model of no heads
        raise ValueError(f"{prefix}a size that others are divided by, such as num_attention_heads, is 0.") from None


def shard_bytes(size: object) -> int:
    """Return the most bytes of weights in a file from a whole number, or text like "5GB" or "1.5GB".

    Raises:
        ValueError: it is neither, or less than a byte.
    """
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (parts := _SIZE.fullmatch(size)):
        count = int(Decimal(parts[1]) * _UNITS[parts[2]])
    if count < 1:
        raise ValueError(f"A shard's size must be a number of bytes, 1 or more, or like '5GB', got {quoted(size)}.")
    return count
