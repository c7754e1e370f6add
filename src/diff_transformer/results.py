"""One typed record for every measured number, and the files that carry such records from a run to its report.

A results file says what was measured (`Result`), on what, by which command and from which code (`Environment`).
Files are JSON without NaN: a number that is not finite is written as null and read back as NaN. Every file is written
under a temporary name and then renamed, so that a reader never sees half of one.
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Interval = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured value of one arm.

    `interval` is the 95 % interval that `method` describes, `n` the number of things averaged over, `better` the
    direction in which the measure improves (None: neither), `group` the part measured (e.g. a depth "0–25 %").
    """

    name: str
    arm: str
    value: float
    interval: Interval | None = None
    n: int | None = None
    unit: str = ""
    seed: int | None = None
    better: Literal["higher", "lower"] | None = None
    group: str | None = None
    method: str = ""

    def __post_init__(self) -> None:
        if not self.name or not self.arm:
            raise ValueError(f"a result needs a name and an arm, got name={self.name!r}, arm={self.arm!r}")
        if self.better not in ("higher", "lower", None):
            raise ValueError(f"better must be 'higher', 'lower' or None, got {self.better!r}")
        if self.interval is not None and (len(self.interval) != 2 or self.interval[0] > self.interval[1]):
            raise ValueError(f"the interval of {self.name} must be (low, high), got {self.interval!r}")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a number comes from: the command line, the device's name, versions, and the commit (None outside git)."""

    command: str
    device: str
    versions: dict[str, str]
    commit: str | None
    created: str


@dataclass(frozen=True, kw_only=True)
class ResultsFile(Environment):
    """The content of a `results.json`: an environment, the settings of the run, and its results."""

    title: str
    settings: dict[str, Any]
    records: tuple[Result, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionExample:
    """The content of an `attention.json`: the maps of one head of every arm, for one example.

    `maps[arm][map]` is an (N, N) matrix, rows are queries; positions count from 0, `layers` and `heads` from 1.
    """

    tokens: tuple[str, ...]
    layers: dict[str, int]
    heads: dict[str, int]
    query_position: int
    answer_positions: tuple[int, ...]
    needle_positions: tuple[int, ...]
    maps: dict[str, dict[str, list[list[float]]]]
    # "lambda" in the file; the word is Python's
    lambda_: float

    def __post_init__(self) -> None:
        if not self.layers.keys() == self.heads.keys() == self.maps.keys():
            raise ValueError("layers, heads and maps must be of the same arms")
        size = len(self.tokens)
        positions = (self.query_position, *self.answer_positions, *self.needle_positions)
        if any(not 0 <= position < size for position in positions):
            raise ValueError(f"positions must lie in 0 … {size - 1}, got {positions}")
        for arm, named in self.maps.items():
            for name, rows in named.items():
                if len(rows) != size or any(len(row) != size for row in rows):
                    raise ValueError(f"the map {name} of {arm} must have {size} rows of {size} weights")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The content of a `samples.json`: one prompt and how each arm goes on from it."""

    prompt: str
    diff: str
    softmax: str


def proportion_interval(successes: int, n: int) -> Interval:
    """Wilson's 95 % score interval of a proportion: `successes` out of `n` independent trials."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0 … n with n ≥ 1, got successes={successes}, n={n}")
    z = NormalDist().inv_cdf(0.975)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding must not push an end past the share itself when all or none succeed.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95 % interval of the mean of independent `values`; None for one value, whose spread is unknown."""
    if not values:
        raise ValueError("the mean of no values has no interval")
    if len(values) == 1:
        return None
    if not all(map(math.isfinite, values)):
        return (math.nan, math.nan)
    half = _t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return (fmean(values) - half, fmean(values) + half)


def _t_quantile(df: int) -> float:
    """The 0.975 quantile of Student's t with `df` degrees of freedom."""
    z = NormalDist().inv_cdf(0.975)
    if df > 200:  # Cornish–Fisher; the next term is below 1e-6
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    low, high = z, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_mass(middle, df) < 0.95 else (low, middle)
    return high


def _t_mass(t: float, df: int) -> float:
    """P(|T| < t): the finite sums for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2 == 1
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(1 + odd, df, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    inner = math.sin(angle) * total
    return (angle + inner) * 2 / math.pi if odd else inner


def capture_environment(device: str | None = None) -> Environment:
    """What every results file says about its origin; `device` is a torch device string, by default the one in use."""
    versions = {"python": platform.python_version()}
    for package in ("diff-transformer", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            versions[package] = "not installed"
    return Environment(
        command=command_line(),
        device=device_name(device),
        versions=versions,
        commit=_git_commit(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def capture_results(
    title: str, settings: Mapping[str, Any], records: Sequence[Result], device: str | None = None
) -> ResultsFile:
    """`records` with the environment they were measured in, ready for `write_json(run / "results.json", …)`."""
    environment = capture_environment(device)
    return ResultsFile(**vars(environment), title=title, settings=dict(settings), records=tuple(records))


def command_line() -> str:
    """The command as it can be typed again, without the folder that its program lies in."""
    program = Path(sys.argv[0])
    if program.stem in ("__main__", "diff-transformer"):
        return shlex.join(["diff-transformer", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def device_name(device: str | None = None) -> str:
    """A device as a reader knows it: the GPU's name, or the processor's with the number of threads torch uses."""
    # Here and not above: reading a results file must not cost an import of torch.
    import torch

    kind = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    if kind.type != "cpu":
        return f"{kind.type} on {platform.machine()}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def _git_commit() -> str | None:
    """The commit of the checkout that this file belongs to, "-dirty" where it was changed since; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository: only a tracked file tells of ours.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None
    except (OSError, subprocess.SubprocessError):
        return None


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text under a temporary name, then rename: the old file stays whole until the new one is."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write records, mappings, sequences, numbers, tensors and arrays as strict JSON (not finite → null)."""
    return write_text(path, json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value):
        return {field.name.rstrip("_"): _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays, without importing what they come from
        return _plain(value.tolist())
    raise ValueError(f"a results file holds numbers, text, lists and mappings, not {type(value).__name__}")


def read_results(path: str | Path) -> ResultsFile:
    """Read a `results.json`. Raises FileNotFoundError, or ValueError naming the file and what is wrong in it."""
    return _read_record(path, ResultsFile)


def read_attention(path: str | Path) -> AttentionExample:
    """Read an `attention.json`. Raises as `read_results` does."""
    return _read_record(path, AttentionExample)


def read_samples(path: str | Path) -> Samples:
    """Read a `samples.json`. Raises as `read_results` does."""
    return _read_record(path, Samples)


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises FileNotFoundError, or ValueError naming the file."""
    return _parse(_read(path), str(path))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`: a dict per logged step, without the half line that a running training is writing."""
    *whole, _ = _read(path).split("\n")
    return [parse_metrics_line(text, f"{path}, line {number}") for number, text in enumerate(whole, start=1)]


def parse_metrics_line(text: str, where: str) -> dict[str, Any]:
    """A line of a `metrics.jsonl`, which lies `where`. Raises ValueError if it is none."""
    line = _parse(text, where)
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ValueError(f"{where}: expected an object with a whole number 'step'")
    return line


def _read(path: str | Path) -> str:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _read_record(path: str | Path, kind: type[T]) -> T:
    data = read_json(path)
    try:
        return _as(kind, data, "the file")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _as(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gives it, as the type `hint`; ValueError saying where it does not fit. null is a float: NaN."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _as(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is Literal and value in arguments:
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        return _as_record(hint, value, where)
    if origin is dict and isinstance(value, dict):
        return {key: _as(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, list):
        if origin is tuple and arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ValueError(f"{where} must hold {len(arguments)} values, got {len(value)}")
        return origin(_as(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if hint is float and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
        return math.nan if value is None else float(value)
    if hint in (int, str) and isinstance(value, hint) and not isinstance(value, bool):
        return value
    allowed = f"one of {arguments}" if origin is Literal else "an object" if is_dataclass(hint) else None
    raise ValueError(f"{where} must be {allowed or getattr(origin or hint, '__name__', hint)}, got {value!r:.60}")


def _as_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    keys = {name.rstrip("_"): name for name in hints}
    if missing := sorted(keys.keys() - value.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - keys.keys()):
        raise ValueError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(keys))}")
    return kind(**{name: _as(hints[name], value[key], f"{where}.{key}") for key, name in keys.items()})
