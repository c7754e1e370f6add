"""`bench model`: whole language models, ours beside its twin, and transformers' DiffLlama beside its Llama."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from diff_transformer.bench.attempt import attempt, give_back_memory
from diff_transformer.bench.clock import wall_clock
from diff_transformer.bench.model_judge import Judge, filled_cache, tokens_of
from diff_transformer.bench.model_settings import (
    DIFF,
    DIFF_LLAMA,
    ENTRIES,
    LLAMA,
    PASSES,
    TWIN,
    ModelSettings,
    build,
    layers_that_fit,
    ready,
)
from diff_transformer.bench.records import STEP, WRONG, Bar, Row, Watcher, ratio_bar, timed_fields
from diff_transformer.bench.settings import DTYPES, cuda_versions
from diff_transformer.bench.timing import alternate, spread
from diff_transformer.results import capture_environment

# What a row's ratio is to, besides the twin.
OTHER_BASE = {DIFF_LLAMA: LLAMA}
LEARNING_RATE = 1e-4
CUDA_BAR, CUDA_BAR_LENGTH = 1.03, 4096

# A row that is checked and not timed yet, of each model in a pass at a length in a dtype.
Checked = dict[tuple[str, int, str], dict[str, Row]]


def measure_model(settings: ModelSettings, watch: Watcher) -> tuple[dict[str, Any], list[Row]]:
    """The document to write, and its rows."""
    on_cuda = torch.device(settings.device).type == "cuda"
    cases = settings.cases()
    total, done = (1 + len(settings.dtypes)) * len(cases), 0
    checked: Checked = {}
    models = {name: build(name, settings.checked) for name in settings.names}
    for pass_, length in cases:
        watch.stage(f"check, {PASSES[pass_]}, {length} tokens", done, total)
        checked |= _check(models, pass_, length, settings)
        done += 1
    del models
    rows: list[Row] = []
    sizes: dict[str, int] = {}
    fitted: dict[str, int] = {}
    for dtype in settings.dtypes:
        give_back_memory(torch.device(settings.device))
        measured, models = _models(settings, DTYPES[dtype])
        if settings.layers is None and measured.layers is not None:
            fitted[dtype] = measured.layers
        sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
        for pass_, length in cases:
            watch.stage(f"{PASSES[pass_]}, {dtype}, {length} tokens", done, total)
            for row in _measure_case(models, checked[pass_, length, dtype], pass_, length, measured):
                rows.append(row)
                watch.row(row)
            done += 1
        del models
    notes = [
        f"{count} layers in {name}, as many as the device holds of all models together."
        for name, count in fitted.items()
    ]
    if settings.checked != settings:
        vocabulary, layers = settings.checked.vocabulary, settings.checked.layers
        notes.append(f"Results were checked with {layers} of the layers and a vocabulary of {vocabulary:,}.")
    if on_cuda:
        notes.append(cuda_versions())
    document = {
        **vars(capture_environment(settings.device)),
        "title": "bench model",
        "settings": {**vars(settings), "threads": torch.get_num_threads()},
        "candidates": {name: ENTRIES[name].about for name in sizes},
        "notes": notes,
        "parameters": sizes,
        "bars": _cuda_bars(rows) if on_cuda else _bars(rows),
        "rows": rows,
    }
    return document, rows


def _check(models: dict[str, nn.Module], pass_: str, length: int, settings: ModelSettings) -> Checked:
    """Each model's error in a pass, in all dtypes, whose truth is the same."""
    device, checked = torch.device(settings.device), settings.checked
    found: Checked = {(pass_, length, dtype): {} for dtype in settings.dtypes}
    for name, model in models.items():
        torch.compiler.reset()  # torch stops compiling the code that all models share after a number of them
        make = functools.partial(Judge, model, ENTRIES[name].plain, pass_, length, checked)
        judge, no_judge = attempt(make, device)
        for dtype in settings.dtypes:
            row, reason = Row(candidate=name, pass_=PASSES[pass_], dtype=dtype, shape={}), no_judge
            if judge is not None:
                work = functools.partial(_error, judge, model, DTYPES[dtype], checked)
                error, reason = attempt(work, device)
                row = replace(row, error=error)
            found[pass_, length, dtype][name] = replace(row, reason=WRONG if row.wrong else reason)
    return found


def _error(judge: Judge, model: nn.Module, dtype: torch.dtype, settings: ModelSettings) -> float:
    return judge.error(ready(copy.deepcopy(model), dtype, settings), dtype)


def _models(settings: ModelSettings, dtype: torch.dtype) -> tuple[ModelSettings, dict[str, nn.Module]]:
    """The models in a dtype, and the settings with their number of layers.

    Where that is left open it is first counted, then tried with what needs most, a training step of every model while
    the others hold their optimizers' state; as long as that does not fit, a quarter of the layers go.
    """
    if settings.layers is not None:
        return settings, {name: ready(build(name, settings), dtype, settings) for name in settings.names}
    device = torch.device(settings.device)
    layers = layers_that_fit(settings, dtype, torch.cuda.mem_get_info(device)[0])
    while True:
        chosen = replace(settings, layers=layers)
        models, reason = attempt(functools.partial(_tried, chosen, dtype), device)
        if models is not None:
            give_back_memory(device)
            return chosen, models
        if layers == 1:
            raise ValueError(f"one layer of every model is too much here: {reason}.")
        layers = layers * 3 // 4


def _tried(settings: ModelSettings, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The models, after each of them has taken the longest training step beside the others."""
    torch.compiler.reset()
    models = {name: ready(build(name, settings), dtype, settings) for name in settings.names}
    if "step" in settings.passes:
        longest = max(settings.lengths, key=lambda length: settings.batch_of("step", length) * length)
        steps = [_prepare(model, "step", longest, settings) for model in models.values()]
        for step in steps:
            step()
    return models


def _measure_case(
    models: dict[str, nn.Module], checked: dict[str, Row], pass_: str, length: int, settings: ModelSettings
) -> list[Row]:
    torch.compiler.reset()
    device, batch = torch.device(settings.device), settings.batch_of(pass_, length)
    assert settings.layers is not None  # `_models` has chosen where it was left open
    shape = {"batch": batch, "length": length, "hidden": settings.hidden_size, "layers": settings.layers}
    rows = {name: replace(row, shape=shape) for name, row in checked.items()}
    runs: dict[str, Callable[[], object]] = {}
    for name, row in rows.items():
        if row.reason is not None:
            continue
        run, reason = attempt(functools.partial(_started, models[name], pass_, length, settings), device)
        rows[name] = replace(row, reason=reason)
        if run is not None:
            runs[name] = run
    if TWIN not in runs:
        return [replace(row, reason=row.reason or f"the twin: {rows[TWIN].reason}") for row in rows.values()]
    times, reason = attempt(lambda: alternate(runs, wall_clock(device), settings.rounds), device)
    if times is None:
        return [replace(row, reason=row.reason or reason) for row in rows.values()]
    tokens = batch * (1 if pass_ == "decode" else length)
    finished: list[Row] = []
    for name, row in rows.items():
        for base in (TWIN, OTHER_BASE.get(name)):
            if base in times and name in times:
                fields: dict[str, Any] = timed_fields(times[name], times[base])
                fields["tokens_per_second"] = tokens / spread(times[name]).median
                finished.append(replace(row, against=base, **fields))
            elif base == TWIN:
                finished.append(row)
    return finished


def _started(model: nn.Module, pass_: str, length: int, settings: ModelSettings) -> Callable[[], object]:
    """What is timed, after its first run: that compiles, and the optimizer makes its state in it."""
    run = _prepare(model, pass_, length, settings)
    run()
    return run


def _prepare(model: nn.Module, pass_: str, length: int, settings: ModelSettings) -> Callable[[], object]:
    """One run of a pass: what is timed."""
    tokens = tokens_of(settings, pass_, length)
    if pass_ == "decode":
        cache, last = filled_cache(model, tokens[:, :-1]), tokens[:, -1:]

        def decode() -> None:
            with torch.no_grad():
                model(last, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return decode
    if pass_ == "forward":

        def forward() -> None:
            with torch.no_grad():
                model(tokens, use_cache=False)

        return forward
    # One kernel for all weights, without copies of them; on the CPU torch's own choice.
    fused = True if tokens.device.type == "cuda" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cuda_bars(rows: Sequence[Row]) -> list[Bar]:
    text = f"{STEP}, bfloat16, length {CUDA_BAR_LENGTH}"
    place = (DIFF, STEP, "bfloat16", TWIN, CUDA_BAR_LENGTH)

    def meets(row: Row) -> bool:
        return (row.candidate, row.pass_, row.dtype, row.against, row.shape["length"]) == place

    return [ratio_bar(text, CUDA_BAR, rows, meets)]


def _bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for dtype, limit in (("float32", 1.0), ("bfloat16", 1.05)):

        def concerned(row: Row, dtype: str = dtype) -> bool:
            return (row.candidate, row.pass_, row.dtype, row.against) == (DIFF, STEP, dtype, TWIN)

        bars.append(ratio_bar(f"{STEP}, {dtype}", limit, rows, concerned))
    return bars
