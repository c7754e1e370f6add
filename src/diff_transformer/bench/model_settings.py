"""What `bench model` measures, how its models are built, and how many layers of them a GPU holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer.bench.records import DECODE, FORWARD, STEP
from diff_transformer.bench.settings import check_choice, check_device, check_dtypes, check_sizes, with_defaults
from diff_transformer.bench.timing import check_rounds
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

PASSES = {"forward": FORWARD, "step": STEP, "decode": DECODE}
TWIN, DIFF, LLAMA, DIFF_LLAMA = "twin", "diff", "Llama", "DiffLlama"
# The paper's 3B models (Table 7): the sizes of a layer, and of layers as many as the device holds, at most the paper's.
PAPER_LAYERS = 28
CUDA = {
    "dtypes": ("bfloat16",),
    "tokens": 4096,
    "lengths": (2048, 4096),
    "contexts": (2048, 4096),
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "layers": None,
    "head_dim": 128,
    "vocabulary": 100_288,
    # Layers are all alike: one of them, in float64 with all its gradients, is what a device holds beside copies of it.
    "check_layers": 1,
    "check_vocabulary": 8192,
}
# Of the free memory, what models may take by the count below, which knows nothing of the allocator's gaps.
MEMORY_SHARE = 0.85


@dataclass(frozen=True)
class Entry:
    """A model to measure: how it is built, and which of its attention implementations is the plain formula."""

    about: str
    build: Callable[["ModelSettings", str], nn.Module]
    plain: str
    implementation: str


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What to measure: the sizes are the twin's. The defaults are those of the CPU; `on` takes the device's.

    Args:
        batch: sequences at a time; `tokens`: of a forward pass and of a training step, or as many sequences as have
            so many tokens together, at least one.
        lengths: of a sequence in a forward pass and in a training step. `contexts`: tokens in the cache when decoding.
        layers: how many, or None for as many as the device holds of all models together.
        passes: of "forward", "step" and "decode".
        candidates: names besides the twin, which always runs; None for all.
        compile: whether the decoder layers are compiled.
        check_layers, check_vocabulary: sizes of the models whose results are checked; None for those measured.

    Raises:
        ValueError: something that is not among what is allowed.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch: int = 1
    tokens: int | None = None
    lengths: tuple[int, ...] = (1024,)
    contexts: tuple[int, ...] = (2048,)
    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int | None = 8
    head_dim: int = 64
    vocabulary: int = 8192
    passes: tuple[str, ...] = tuple(PASSES)
    candidates: tuple[str, ...] | None = None
    rounds: int | None = None
    compile: bool = False
    check_layers: int | None = None
    check_vocabulary: int | None = None

    @classmethod
    def on(cls, device: str, **given: Any) -> "ModelSettings":
        """The device's defaults, but for what is given. A batch that is given holds at all lengths."""
        if "batch" in given:
            given = {"tokens": None, **given}
        if given.get("compile"):
            given = {"passes": ("forward", "step"), **given}
        return cls(device=device, **with_defaults(device, CUDA, given))

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtypes(self.dtypes)
        check_rounds(self.rounds)
        check_choice("pass", self.passes, PASSES)
        check_choice("candidate", self.candidates or (), ENTRIES)
        check_sizes(length=min((*self.lengths, *self.contexts), default=1))
        sizes = {"batch": self.batch, "tokens": self.tokens, "layers": self.layers, "check_layers": self.check_layers}
        sizes |= {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        sizes |= {"head_dim": self.head_dim, "vocabulary": self.vocabulary, "check_vocabulary": self.check_vocabulary}
        check_sizes(**{name: size for name, size in sizes.items() if size is not None})
        if self.layers is None and torch.device(self.device).type != "cuda":
            raise ValueError("how many layers fit is known on CUDA alone; name a number of layers.")
        if self.compile and "decode" in self.passes:
            raise ValueError("decoding is not measured with compiled layers, since its cache grows; leave one of both.")

    @property
    def names(self) -> list[str]:
        """The models to measure, the twin first."""
        return [name for name in ENTRIES if self.candidates is None or name == TWIN or name in self.candidates]

    @property
    def checked(self) -> "ModelSettings":
        """The same for the models whose results are checked."""
        layers, vocabulary = self.check_layers or self.layers, self.check_vocabulary or self.vocabulary
        return replace(self, layers=layers, vocabulary=min(vocabulary, self.vocabulary))

    def cases(self) -> list[tuple[str, int]]:
        """Each pass with each of its lengths."""
        return [(name, n) for name in self.passes for n in (self.contexts if name == "decode" else self.lengths)]

    def batch_of(self, pass_: str, length: int) -> int:
        """Sequences at a time."""
        return self.batch if self.tokens is None or pass_ == "decode" else max(1, self.tokens // length)

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
            "max_position_embeddings": max(*self.lengths, *(context + 1 for context in self.contexts)),
        }


def layers_that_fit(settings: ModelSettings, dtype: torch.dtype, free: int) -> int:
    """How many layers all models can have together in so many free bytes while one of them takes a training step.

    A model holds its weights and AdamW's two moments, the one that takes the step its gradients and activations too:
    of a layer about 20 tensors of the hidden size and 4 of the intermediate size for each token, and of the logits one
    in its dtype and three in float32.
    """
    size, models = dtype.itemsize, len(settings.names)
    hidden, inner, vocabulary = settings.hidden_size, settings.intermediate_size, settings.vocabulary
    tokens = max(settings.batch_of("step", length) * length for length in settings.lengths)
    of_layer, of_ends = 4 * hidden**2 + 3 * hidden * inner, 2 * vocabulary * hidden
    weights = (3 * models + 1) * size
    fixed = weights * of_ends + tokens * vocabulary * (size + 3 * 4)
    each = weights * of_layer + tokens * (20 * hidden + 4 * inner) * size
    return max(1, min(PAPER_LAYERS, int((MEMORY_SHARE * free - fixed) // each)))


def build(name: str, settings: ModelSettings) -> nn.Module:
    """A model in float32 whose weights bfloat16 holds, so that all dtypes have the same ones."""
    device = torch.device(settings.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = ENTRIES[name].build(settings, ENTRIES[name].implementation)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.to(device).train()


def ready(model: nn.Module, dtype: torch.dtype, settings: ModelSettings) -> nn.Module:
    """The model itself as it is measured: in a dtype, and compiled where that is asked for."""
    model = model.to(dtype)
    if settings.compile:
        # The stack as one graph: a layer by itself would be compiled anew for every λ_init.
        model.get_submodule("model").compile(dynamic=False)
    return model


def _ours(attention_type: str) -> Callable[[ModelSettings, str], nn.Module]:
    def make(settings: ModelSettings, implementation: str) -> nn.Module:
        config = DiffTransformerConfig(attention_type=attention_type, **settings.config())
        config._attn_implementation = implementation
        return DiffTransformerForCausalLM(config)

    return make


def _theirs(config_class: Any, model_class: Any) -> Callable[[ModelSettings, str], nn.Module]:
    def make(settings: ModelSettings, implementation: str) -> nn.Module:
        config = config_class(**settings.config())
        config._attn_implementation = implementation
        return model_class(config)

    return make


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
