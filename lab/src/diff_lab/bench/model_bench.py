"""Times whole language models (`bench model`): DIFF beside the Transformer, DiffLlama beside Llama, other decoders."""

import copy
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from diff_lab.bench.benchmark import (
    BASELINE,
    DECODE,
    DTYPES,
    FORWARD,
    STEP,
    BenchRow,
    BenchSettings,
    Recorder,
    Run,
    check_choice,
    free_memory,
    time_case,
    try_run,
    wall_clock,
)
from diff_lab.bench.model_anchors import WARM, CTranslate2Decoding
from diff_transformer.model import DiffCache, DiffTransformerForCausalLM, Int8Config
from diff_transformer.model.cache import CACHE_NAME
from diff_transformer.ops.reference import rounding_band, share_of_allowed
from diff_transformer.utils.environment import installed_version

DIFF, LLAMA, DIFF_LLAMA = "diff", "Llama", "DiffLlama"
COMPILED, LLAMA_COMPILED, CTRANSLATE2 = "diff, compiled", "Llama, compiled", "CTranslate2"
INT8 = "int8"
# Candidates that get more rows, relative to others than the baseline.
OTHER_BASES = {
    DIFF: (LLAMA, CTRANSLATE2),
    COMPILED: (LLAMA_COMPILED, CTRANSLATE2),
    DIFF_LLAMA: (LLAMA,),
}
LEARNING_RATE = 1e-4
TOKENS = 64  # in a row, that are timed
ROUNDINGS = 8  # to the dtype, on the way through a model

# A row that is checked and not timed yet, of each model in a pass at a length in a dtype.
Checked = dict[tuple[str, int, str], dict[str, BenchRow]]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(BenchSettings):
    """Settings of the benchmark of whole models, besides those of both benchmarks. The sizes are the Transformer's.

    `lengths` are those of a sequence, and when decoding of the cache. In eight bits models decode, and do nothing else.
    Results are checked on models with `check_layers` and `check_vocabulary`, by default those measured.
    """

    PASSES: ClassVar = {"forward": FORWARD, "step": STEP, "decode": DECODE}
    DTYPES: ClassVar = (*DTYPES, INT8)
    # The layers of the paper's 3B models (Table 7), 12 of 28: 80 GB hold all models with their optimizers.
    ON_CUDA: ClassVar = {
        "dtypes": ("bfloat16",),
        "tokens": 4096,
        "lengths": (2048, 4096),
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "layers": 12,
        "head_dim": 128,
        "vocabulary": 100_288,
        # Layers are all alike: a device holds one of them in float64 with all its gradients, beside copies of it.
        "check_layers": 1,
        "check_vocabulary": 8192,
    }

    dtypes: tuple[str, ...] = DTYPES
    passes: tuple[str, ...] = tuple(PASSES)
    lengths: tuple[int, ...] = (1024, 2048)
    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int = 8
    head_dim: int = 64
    vocabulary: int = 8192
    check_layers: int | None = None
    check_vocabulary: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("candidate", self.candidates or (), MODELS)
        if not any(map(self.cases, self.dtypes)):
            raise ValueError(f"dtype int8 is for the pass decode alone, got {', '.join(self.passes)}.")

    @property
    def names(self) -> list[str]:
        """The models to measure, the baseline first."""
        chosen = MODELS if self.candidates is None else (BASELINE, *self.candidates)
        decodes = "decode" in self.passes
        return [name for name in MODELS if name in chosen and (decodes or MODELS[name].decoder is None)]

    @property
    def for_check(self) -> "ModelSettings":
        """The same for the models whose results are checked."""
        layers, vocabulary = self.check_layers or self.layers, self.check_vocabulary or self.vocabulary
        return replace(self, layers=layers, vocabulary=min(vocabulary, self.vocabulary))

    def cases(self, dtype: str | None = None) -> list[tuple[str, int]]:
        """Return each pass that a dtype has, by its name in results, with each length."""
        passes = [name for name in self.passes if dtype != INT8 or name == "decode"]
        return [(self.PASSES[name], length) for name in passes for length in self.lengths]

    def batch_of(self, pass_: str, length: int) -> int:
        """Return the sequences at a time."""
        return self.batch if pass_ == DECODE else self.batch_at(length)

    def config(self) -> dict[str, Any]:
        """Return the settings that all configurations share."""
        heads = self.hidden_size // self.head_dim
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": max(self.lengths) + 1,
        }


@dataclass(frozen=True)
class MeasuredModel:
    """A model to measure.

    `plain` names the attention implementation with the plain formula, `implementation` the one that is measured;
    `options` are the configuration's besides the sizes. A `decoder` takes the model in float32, tokens and a dtype in
    place of :func:`decode_run`, and is measured in decoding alone.
    """

    about: str
    plain: str
    implementation: str
    options: Mapping[str, str]
    decoder: Callable[[Any, Tensor, str], Callable[[], Tensor]] | None = None


def _decode_compiled(model: Any, tokens: Tensor, dtype: str) -> Callable[[], Tensor]:
    """Return a run that decodes as that of :func:`decode_run`, in one graph and behind a static cache."""
    model, count, last = cast(model.eval(), dtype), tokens.shape[1] - 1, tokens[:, -1:]
    cache = StaticCache(config=model.config, max_cache_len=count + 1)
    with torch.no_grad():
        model(tokens[:, :-1], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    torch.compiler.reset()  # which keeps few graphs of one function, and the other cases' are needed no more
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    inputs = {CACHE_NAME: cache, "position_ids": torch.full_like(last[:1], count)}

    @torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)  # of calls that are all alike
    @torch.no_grad()
    def decode() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(count)
        logits: Tensor = step(last, **inputs, use_cache=True).logits
        return logits

    return decode


_OURS, _PLAIN = "diff_attention", "diff_attention_reference"
_LLAMA = "eager", "sdpa", {"model_type": "llama"}
_SOFTMAX, _DIFF = ({"model_type": "diff_transformer", "attention_type": kind} for kind in ("softmax", "diff"))
MODELS = {
    BASELINE: MeasuredModel("our Transformer, torch's SDPA", "eager", _OURS, _SOFTMAX),
    DIFF: MeasuredModel("our DIFF Transformer, the operator's backend auto", _PLAIN, _OURS, _DIFF),
    COMPILED: MeasuredModel("it in one graph, with a static cache", _PLAIN, _OURS, _DIFF, _decode_compiled),
    "diff, sdpa": MeasuredModel('our DIFF Transformer, attn_implementation="sdpa"', _PLAIN, "sdpa", _DIFF),
    LLAMA: MeasuredModel("transformers' Llama, torch's SDPA", *_LLAMA),
    LLAMA_COMPILED: MeasuredModel("it in one graph of torch.compile, with a static cache", *_LLAMA, _decode_compiled),
    CTRANSLATE2: MeasuredModel("it by CTranslate2", *_LLAMA, CTranslate2Decoding),
    DIFF_LLAMA: MeasuredModel("transformers' DiffLlama, torch's SDPA", "eager", "sdpa", {"model_type": "diffllama"}),
}


def build(name: str, settings: ModelSettings) -> Any:
    """Build a model in float32 whose weights bfloat16 represents exactly, so that all dtypes have the same ones."""
    device, measured = settings.torch_device, MODELS[name]
    with torch.random.fork_rng(devices=[device] if settings.on_cuda else []), device:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**settings.config(), **measured.options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=measured.implementation)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.to(device).train()


def cast(model: Any, dtype: str) -> Any:
    """Bring a model to a dtype, in place if it can be, and to eight bits as ``from_pretrained`` does."""
    if dtype != INT8:
        return model.to(DTYPES[dtype])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = {"attn_implementation": model.config._attn_implementation, "quantization_config": Int8Config()}
        return type(model).from_pretrained(folder, **settings).to(model.device)


def tokens_of(settings: ModelSettings, pass_: str, length: int) -> Tensor:
    """Return the tokens of a pass; when decoding those of the cache, and one more."""
    generator = torch.Generator().manual_seed(0)
    size = (settings.batch_of(pass_, length), length + (pass_ == DECODE))
    return torch.randint(settings.vocabulary, size, generator=generator).to(settings.device)


def filled_cache(model: Any, tokens: Tensor) -> DynamicCache:
    """Return a cache that holds the tokens, of the class that ``generate`` makes for the model."""
    cache = (DiffCache if isinstance(model, DiffTransformerForCausalLM) else DynamicCache)(config=model.config)
    with torch.no_grad():
        model(tokens, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    return cache


def decode_run(name: str, model: Any, tokens: Tensor, dtype: str) -> Callable[[], Tensor]:
    """Return a run that decodes the last of tokens (B, N) to logits (B, 1, V), behind a cache of those before."""
    model.eval()
    if (decoder := MODELS[name].decoder) is not None:
        return decoder(model, tokens, dtype)
    cache, last = filled_cache(model, tokens[:, :-1]), tokens[:, -1:]

    @torch.no_grad()
    def decode() -> Tensor:
        logits: Tensor = model(last, use_cache=True, **{CACHE_NAME: cache}).logits
        cache.crop(-1)
        return logits

    return decode


def _answer(model: Any, pass_: str, tokens: Tensor) -> list[Tensor]:
    """Compute a pass without a cache: the logits, for a training step also the gradient of all weights, one vector."""
    if pass_ == STEP:
        outputs = model(tokens, labels=tokens, use_cache=False)
        gradients = torch.autograd.grad(outputs.loss, list(model.parameters()))
        return [outputs.logits.detach(), torch.cat([gradient.double().flatten() for gradient in gradients])]
    with torch.no_grad():
        return [model(tokens, use_cache=False, logits_to_keep=1 if pass_ == DECODE else 0).logits]


def model_check(name: str, model: Any, pass_: str, length: int, settings: ModelSettings) -> Callable[[str], float]:
    """Solve a pass with the same weights in float64 and the plain formula for attention, and return the model's error
    in a dtype as a share of the budget: twice the plain formula's in that dtype, and a band.
    """
    tokens, formula = tokens_of(settings, pass_, length), copy.deepcopy(model)
    formula.set_attn_implementation(MODELS[name].plain)
    truths = [value.double() for value in _answer(copy.deepcopy(formula).double(), pass_, tokens)]

    def error(dtype: str) -> float:
        plains = _answer(cast(copy.deepcopy(formula), dtype), pass_, tokens)
        own = copy.deepcopy(model) if MODELS[name].decoder else cast(copy.deepcopy(model), dtype)
        outputs = [decode_run(name, own, tokens, dtype)()] if pass_ == DECODE else _answer(own, pass_, tokens)
        eps = torch.finfo(DTYPES.get(dtype, torch.bfloat16)).eps  # in which eight-bit layers compute
        return max(
            share_of_allowed(
                _rms(value.double() - truth),
                _rms(of_plain.double() - truth),
                rounding_band(_rms(truth), eps, ROUNDINGS, terms=length),
            )
            for value, of_plain, truth in zip(outputs, plains, truths, strict=True)
        )

    return error


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def measure_model(settings: ModelSettings, recorder: Recorder) -> dict[str, Any]:
    """Return the document to write."""
    cases, for_check = settings.cases(), settings.for_check
    recorder.parts = len(cases) + sum(len(settings.cases(dtype)) for dtype in settings.dtypes)
    checked: Checked = {}
    models = {name: build(name, for_check) for name in settings.names}
    for pass_, length in cases:
        recorder.begin(f"check, {pass_}, {length} tokens")
        checked |= _check(models, pass_, length, settings)
    del models
    for dtype in settings.dtypes:
        free_memory(settings.torch_device)
        # Those with a decoder are built for their cases alone.
        own = (name for name in settings.names if MODELS[name].decoder is None)
        models = {name: cast(build(name, settings), dtype) for name in own}
        parameters = {name: _parameters(model) for name, model in models.items()}
        for pass_, length in settings.cases(dtype):
            recorder.begin(f"{pass_}, {dtype}, {length} tokens")
            recorder.add(_measure_case(models, checked[pass_, length, dtype], pass_, length, settings))
        del models
    notes = []
    if for_check != settings:
        layers, vocabulary = for_check.layers, for_check.vocabulary
        notes.append(f"Results were checked with {layers} of the layers and a vocabulary of {vocabulary:,}.")
    if CTRANSLATE2 in settings.names:
        notes.append(f"CTranslate2 {installed_version('ctranslate2')}.")
    return settings.document(
        "bench model",
        notes,
        candidates={name: MODELS[name].about for name in settings.names},
        parameters=parameters,
        rows=recorder.rows,
    )


def _parameters(model: nn.Module) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if not name.endswith("weight_scale"))


def _check(models: dict[str, nn.Module], pass_: str, length: int, settings: ModelSettings) -> Checked:
    """Return each model's error in a pass, in all dtypes, which share one truth."""
    device = settings.torch_device
    dtypes = [dtype for dtype in settings.dtypes if (pass_, length) in settings.cases(dtype)]
    checked: Checked = {(pass_, length, dtype): {} for dtype in dtypes}
    for name, model in models.items():
        if pass_ != DECODE and MODELS[name].decoder is not None:
            continue
        check, reason = try_run(device, model_check, name, model, pass_, length, settings.for_check)
        for dtype in dtypes:
            error, reason = (None, reason) if check is None else try_run(device, check, dtype)
            row = BenchRow(candidate=name, pass_=pass_, dtype=dtype, shape={})
            checked[pass_, length, dtype][name] = row.checked(error, reason)
    return checked


def _measure_case(
    models: dict[str, nn.Module], checked: dict[str, BenchRow], pass_: str, length: int, settings: ModelSettings
) -> list[BenchRow]:
    batch = settings.batch_of(pass_, length)
    shape = {"batch": batch, "length": length, "hidden": settings.hidden_size, "layers": settings.layers}
    tokens, wall = batch * (1 if pass_ == DECODE else length), wall_clock(settings.torch_device)

    def clock(run: Run, repeats: int) -> float:
        if pass_ != DECODE:
            return wall(run, repeats)
        if isinstance(run, CTranslate2Decoding):
            return run.seconds(TOKENS)
        for _ in range(WARM):  # a token comes behind others of its model
            run()
        return wall(run, TOKENS)

    def prepare(name: str) -> Run:
        if pass_ != DECODE:
            return timed_pass(models[name], pass_, length, settings)
        model = models.get(name) or build(name, settings)
        return decode_run(name, model, tokens_of(settings, pass_, length), checked[name].dtype)

    return time_case(
        {name: replace(row, shape=shape) for name, row in checked.items()},
        prepare,
        settings,
        clock,
        rates=lambda seconds: {"tokens_per_second": tokens / seconds},
        other_bases=OTHER_BASES,
    )


def timed_pass(model: nn.Module, pass_: str, length: int, settings: ModelSettings) -> Run:
    """Return one run of a pass but decoding, as it is timed."""
    tokens = tokens_of(settings, pass_, length)
    if pass_ == STEP:
        # One kernel for all weights, without copies of them; on the CPU torch's own choice.
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=settings.on_cuda or None)

        def step() -> None:
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    return torch.no_grad()(functools.partial(model, tokens, use_cache=False))
