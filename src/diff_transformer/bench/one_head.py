"""One differential head of one sequence on all threads of the CPU: the parallelism must not depend on the heads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from diff_transformer.bench.candidates import AUTO, TWIN, candidates
from diff_transformer.bench.clock import wall_clock
from diff_transformer.bench.operator_settings import OperatorSettings
from diff_transformer.bench.problem import Judge, Shape, draw
from diff_transformer.bench.records import Bar, Row
from diff_transformer.bench.running import check, prepare
from diff_transformer.bench.settings import DTYPES
from diff_transformer.bench.timing import alternate, spread

# The share of a linear speed-up that it has to reach.
ONE_HEAD_SHARE = 0.75
_CPU = torch.device("cpu")


def measure_one_head(settings: OperatorSettings, dtype: str, pass_: str) -> tuple[Row, list[dict[str, Any]]]:
    """Time on one thread, divided by the time on all, round by round.

    Nothing is timed where the row that comes first says why not.
    """
    threads, length = torch.get_num_threads(), settings.one_head_length
    shape = Shape(1, 2, settings.head_dims[0], length, length)
    row = Row(candidate=AUTO, pass_=pass_, dtype=dtype, shape=shape.named())
    if threads == 1:
        return replace(row, reason="there is one thread alone"), []
    whole = draw(shape, _CPU)
    problem = whole.to(DTYPES[dtype])
    row = check(candidates()[AUTO], row, problem, shape, Judge(whole), _CPU)
    if row.reason is not None:
        return row, []
    runs = {}
    for name in (TWIN, AUTO):
        run = prepare(candidates()[name], problem, pass_)
        for count in (1, threads):
            runs[name, count] = _on_threads(count, run)
            runs[name, count]()
    try:
        named = {f"{name} {count}": run for (name, count), run in runs.items()}
        times = alternate(named, wall_clock(_CPU), settings.rounds)
    finally:
        torch.set_num_threads(threads)
    parts = []
    for name in (TWIN, AUTO):
        alone, together = times[f"{name} 1"], times[f"{name} {threads}"]
        gain = spread([a / b for a, b in zip(alone, together, strict=True)])
        part = {"candidate": name, "pass": pass_, "dtype": dtype, "length": length, "threads": threads}
        part |= {"speed_up": gain.median, "quartiles": gain.quartiles, "milliseconds": spread(together).median * 1e3}
        parts.append(part)
    return row, parts


def _on_threads(count: int, run: Callable[[], object]) -> Callable[[], object]:
    def limited() -> object:
        torch.set_num_threads(count)
        return run()

    return limited


def one_head_bar(parts: Sequence[dict[str, Any]]) -> Bar:
    """Whether one head makes use of all threads."""
    text = f"speed-up of one head by all threads, as a share of linear, at least {ONE_HEAD_SHARE}"
    ours = [part for part in parts if part["candidate"] == AUTO]
    if not ours:
        return Bar(text=text, limit=ONE_HEAD_SHARE, worst=None, where=None, holds=None)
    worst = min(ours, key=lambda part: part["speed_up"])
    share = worst["speed_up"] / worst["threads"]
    where = f"{worst['pass']}, {worst['dtype']}, {worst['threads']} threads"
    return Bar(text=text, limit=ONE_HEAD_SHARE, worst=share, where=where, holds=share >= ONE_HEAD_SHARE)
