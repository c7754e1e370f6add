"""`bench model`: whole language models, ours beside its twin, and transformers' DiffLlama beside its Llama."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from diff_transformer.bench.records import DECODE, FORWARD, STEP, Bar, Row, Watcher, ratio_bar, timed_fields
from diff_transformer.bench.settings import DTYPES, check_choice, check_device, check_dtypes, check_sizes
from diff_transformer.bench.timing import alternate, check_rounds
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.results import capture_environment

PASSES = {"forward": FORWARD, "step": STEP, "decode": DECODE}
TWIN, DIFF, LLAMA, DIFF_LLAMA = "twin", "diff", "Llama", "DiffLlama"
# What a row's ratio is to, besides the twin.
OTHER_BASE = {DIFF_LLAMA: LLAMA}
# What roundings alone may add to the plain model's error, relative to the quantity: a few to the dtype, and those of a
# sum over the sequence in float32, which add up as the root of its length.
ROUNDINGS, ACCUMULATOR_EPS = 8, torch.finfo(torch.float32).eps
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Entry:
    """A model to measure: how it is built, and which of its attention implementations is the plain formula."""

    about: str
    build: Callable[["ModelSettings", str], nn.Module]
    plain: str
    implementation: str


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What to measure: the sizes are the twin's.

    Args:
        length: tokens of a forward pass and of a training step. `context`: tokens in the cache when decoding.
        passes: of "forward", "step" and "decode".
        candidates: names besides the twin, which always runs; None for all.

    Raises:
        ValueError: something that is not among what is allowed.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch: int = 1
    length: int = 1024
    context: int = 2048
    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int = 8
    head_dim: int = 64
    vocabulary: int = 8192
    passes: tuple[str, ...] = tuple(PASSES)
    candidates: tuple[str, ...] | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtypes(self.dtypes)
        check_rounds(self.rounds)
        check_choice("pass", self.passes, PASSES)
        check_choice("candidate", self.candidates or (), ENTRIES)
        sizes = ("batch", "length", "context", "hidden_size", "intermediate_size", "layers", "head_dim", "vocabulary")
        check_sizes(**{name: getattr(self, name) for name in sizes})

    def config(self) -> dict[str, Any]:
        """The settings that all configurations share."""
        heads = self.hidden_size // self.head_dim
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max(self.length, self.context + 1),
        }


def _ours(attention_type: str) -> Callable[[ModelSettings, str], nn.Module]:
    def build(settings: ModelSettings, implementation: str) -> nn.Module:
        config = DiffTransformerConfig(attention_type=attention_type, **settings.config())
        config._attn_implementation = implementation
        return DiffTransformerForCausalLM(config)

    return build


def _theirs(config_class: Any, model_class: Any) -> Callable[[ModelSettings, str], nn.Module]:
    def build(settings: ModelSettings, implementation: str) -> nn.Module:
        config = config_class(**settings.config())
        config._attn_implementation = implementation
        return model_class(config)

    return build


_OWN, _PLAIN = "diff_attention", "diff_attention_reference"
ENTRIES = {
    TWIN: Entry("our Transformer, torch's SDPA", _ours("softmax"), "eager", _OWN),
    DIFF: Entry("our DIFF Transformer, the operator's backend auto", _ours("diff"), _PLAIN, _OWN),
    "diff, sdpa": Entry('our DIFF Transformer, attn_implementation="sdpa"', _ours("diff"), _PLAIN, "sdpa"),
    LLAMA: Entry("transformers' Llama, torch's SDPA", _theirs(LlamaConfig, LlamaForCausalLM), "eager", "sdpa"),
    DIFF_LLAMA: Entry(
        "transformers' DiffLlama, torch's SDPA", _theirs(DiffLlamaConfig, DiffLlamaForCausalLM), "eager", "sdpa"
    ),
}


def measure_model(settings: ModelSettings, watch: Watcher) -> tuple[dict[str, Any], list[Row]]:
    """The document to write, and its rows."""
    total, done = len(settings.dtypes) * len(settings.passes), 0
    rows: list[Row] = []
    judges: dict[tuple[str, str], _Judge] = {}
    sizes: dict[str, int] = {}
    for dtype in settings.dtypes:
        models = {name: _build(name, settings) for name in ENTRIES if _wanted(name, settings)}
        sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
        for pass_ in settings.passes:
            text = f"{PASSES[pass_]}, {dtype}, {settings.context if pass_ == 'decode' else settings.length} tokens"
            watch.stage(text, done, total)
            for name in models:
                if (name, pass_) not in judges:
                    judges[name, pass_] = _Judge(models[name], ENTRIES[name].plain, pass_, settings)
            # The judges know the weights as they were built, so a training step starts from those.
            cast = {name: copy.deepcopy(model).to(DTYPES[dtype]) for name, model in models.items()}
            for row in _measure_case(cast, dtype, pass_, judges, settings):
                rows.append(row)
                watch.row(row)
            done += 1
    document = {
        **vars(capture_environment(settings.device)),
        "title": "bench model",
        "settings": {**vars(settings), "threads": torch.get_num_threads()},
        "candidates": {name: ENTRIES[name].about for name in sizes},
        "parameters": sizes,
        "bars": _bars(rows),
        "rows": rows,
    }
    return document, rows


def _wanted(name: str, settings: ModelSettings) -> bool:
    return settings.candidates is None or name == TWIN or name in settings.candidates


def _build(name: str, settings: ModelSettings) -> nn.Module:
    """A model in float32 whose weights bfloat16 holds, so that all dtypes have the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ENTRIES[name].build(settings, ENTRIES[name].implementation)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.to(settings.device).train()


def _tokens(settings: ModelSettings, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(settings.vocabulary, (settings.batch, length), generator=generator).to(settings.device)


def _answer(model: Any, pass_: str, settings: ModelSettings, *, cached: bool) -> list[Tensor]:
    """What a pass computes: the logits, for a training step also the gradient of all weights as one vector."""
    if pass_ == "decode":
        tokens = _tokens(settings, settings.context + 1)
        with torch.no_grad():
            if not cached:
                return [model(tokens, use_cache=False, logits_to_keep=1).logits]
            cache = _filled_cache(model, tokens[:, :-1])
            return [model(tokens[:, -1:], past_key_values=cache, use_cache=True).logits]
    tokens = _tokens(settings, settings.length)
    if pass_ == "forward":
        with torch.no_grad():
            return [model(tokens, use_cache=False).logits]
    outputs = model(tokens, labels=tokens, use_cache=False)
    gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
    return [outputs.logits.detach(), torch.cat([gradient.double().flatten() for gradient in gradients])]


def _filled_cache(model: Any, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


class _Judge:
    """The truth of one model in one pass: the same weights in float64 with the plain formula for attention."""

    def __init__(self, model: Any, plain: str, pass_: str, settings: ModelSettings) -> None:
        self._pass, self._settings = pass_, settings
        self._plain = copy.deepcopy(model)
        self._plain.set_attn_implementation(plain)
        double = copy.deepcopy(self._plain).double()
        self._truth = [value.double() for value in _answer(double, pass_, settings, cached=False)]

    def error(self, model: nn.Module, dtype: torch.dtype) -> float:
        """The error of `model` as a share of what is allowed: twice the plain formula's in `dtype`, and a band."""
        plain = copy.deepcopy(self._plain).to(dtype)
        yardstick = _answer(plain, self._pass, self._settings, cached=False)
        found = _answer(model, self._pass, self._settings, cached=True)
        length = self._settings.context if self._pass == "decode" else self._settings.length
        shares = []
        for value, other, truth in zip(found, yardstick, self._truth, strict=True):
            band = (ROUNDINGS * torch.finfo(dtype).eps + length**0.5 * ACCUMULATOR_EPS) / 2 * _rms(truth)
            share = _rms(value.double() - truth) / (2 * _rms(other.double() - truth) + band)
            shares.append(share if share == share else float("inf"))
        return max(shares)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _measure_case(
    models: dict[str, nn.Module],
    dtype: str,
    pass_: str,
    judges: dict[tuple[str, str], _Judge],
    settings: ModelSettings,
) -> list[Row]:
    length = settings.context if pass_ == "decode" else settings.length
    shape = {"batch": settings.batch, "length": length, "hidden": settings.hidden_size, "layers": settings.layers}
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        error = judges[name, pass_].error(model, DTYPES[dtype])
        row = Row(candidate=name, pass_=PASSES[pass_], dtype=dtype, shape=shape, error=error)
        rows[name] = replace(row, reason="its results are wrong") if row.wrong else row
        if not row.wrong:
            runs[name] = _prepare(model, pass_, settings)
            runs[name]()  # the optimizer makes its state in the first step
    if TWIN not in runs:
        return [replace(row, reason=row.reason or "the twin's results are wrong") for row in rows.values()]
    times = alternate(runs, torch.device(settings.device), settings.rounds)
    finished: list[Row] = []
    for name, row in rows.items():
        for base in (TWIN, OTHER_BASE.get(name)):
            if base in times and name in times:
                fields: dict[str, Any] = timed_fields(times[name], times[base])
                finished.append(replace(row, against=base, **fields))
            elif base == TWIN:
                finished.append(row)
    return finished


def _prepare(model: nn.Module, pass_: str, settings: ModelSettings) -> Callable[[], object]:
    """One run of a pass: what is timed."""
    if pass_ == "decode":
        tokens = _tokens(settings, settings.context + 1)
        cache, last = _filled_cache(model, tokens[:, :-1]), tokens[:, -1:]

        def decode() -> None:
            with torch.no_grad():
                model(last, past_key_values=cache, use_cache=True)
            cache.crop(-1)

        return decode
    tokens = _tokens(settings, settings.length)
    if pass_ == "forward":

        def forward() -> None:
            with torch.no_grad():
                model(tokens, use_cache=False)

        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _bars(rows: Sequence[Row]) -> list[Bar]:
    bars = []
    for dtype, limit in (("float32", 1.0), ("bfloat16", 1.05)):

        def concerned(row: Row, dtype: str = dtype) -> bool:
            return (row.candidate, row.pass_, row.dtype, row.against) == (DIFF, STEP, dtype, TWIN)

        bars.append(ratio_bar(f"{STEP}, {dtype}", limit, rows, concerned))
    return bars
