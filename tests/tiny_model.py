"""Tiny models, their sizes and tokens, and how far apart two of their answers may be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_OPTIONS, ATTENTION_TYPES
from diff_transformer.model.cache import DiffCache
from diff_transformer.nn.layers import draw_normal
from diff_transformer.ops.flex import _cpu_has_vectors

needs_vectors = pytest.mark.skipif(
    not _cpu_has_vectors(), reason="torch compiles FlexAttention on the CPU for AVX2 or more"
)

# Those that a recipe trains from the start: a DEX model is a trained Transformer, and has tests of its own.
KINDS = tuple(name for name, spec in ATTENTION_TYPES.items() if not spec.corrects_heads)
# Those with keys and values of twice the width; they have the headwise norm.
PAIRED = tuple(name for name in KINDS if ATTENTION_TYPES[name].pairs_heads)


class TokenLambda(str):
    """The name of an attention type whose λ can be a projection of the token, and is one by :func:`sizes_for`."""

    __slots__ = ()


def has_lambda_vectors(kind: str) -> bool:
    """Whether λ of a layer is a number, made by Equation 2 from four vectors."""
    return kind in PAIRED and not isinstance(kind, TokenLambda)


def name_of_form(kind: str) -> str:
    """A name for files that tells both λ of a type apart."""
    return f"{kind} λ of tokens" if isinstance(kind, TokenLambda) else kind


def kinds(forms: tuple[str, ...]) -> Any:
    """The fixture `kind` of a file's tests: each of these."""
    return pytest.fixture(params=forms, ids=name_of_form)(lambda request: request.param)


# The types, and of those with a choice of λ the other one.
_CHOOSE = tuple(name for name in KINDS if "token_lambda" in ATTENTION_TYPES[name].settings)
FORMS = (*KINDS, *map(TokenLambda, _CHOOSE))
# Each type once, with that other λ.
LAST_FORMS = tuple(TokenLambda(name) if name in _CHOOSE else name for name in KINDS)
# Those that subtract a second map.
DIFFERENTIAL = tuple(name for name in KINDS if ATTENTION_TYPES[name].differential)
# Those with keys and values of one width, as paged caches, FlashAttention and tensor parallelism have them.
NOT_LATENT = tuple(form for form in FORMS if not ATTENTION_TYPES[form].latent)
IMPLEMENTATIONS = ("diff_attention", "diff_attention_reference", "diff_attention_sdpa", "sdpa", "eager")
# transformers' eager attention takes the softmax in float32, even of float64.
COMPUTES_IN = {"eager": torch.float32}
CACHES: dict[str, Callable[..., Cache]] = {
    "dynamic": DynamicCache,
    "growing": DiffCache,
    "static": partial(StaticCache, max_cache_len=16),
}
# Options of the attention.
OPTIONS: dict[str, Any] = {"attention_bias": True, "qk_norm": True, "output_gate": True}
OPTIONS |= {"exclusive_attention": True, "layers_without_rotary": [1]}
SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_noise_heads": 2,  # of the types with groups: three signal heads to a noise map
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def fitted(kind: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes without options that the type lacks; of latent attention d is the rotary part's width, and a value's."""
    options, taken = {**ATTENTION_OPTIONS, "headwise_norm": "headwise_norm"}, ATTENTION_TYPES[kind].settings
    lacks = {name for pair in options.items() for name in pair if pair[1] not in taken}
    sizes = {name: size for name, size in sizes.items() if name not in lacks}
    if ATTENTION_TYPES[kind].latent:
        d = sizes.pop("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        sizes = {"qk_nope_head_dim": 2, "qk_rope_head_dim": d, "v_head_dim": d, "kv_lora_rank": 8, **sizes}
    return sizes


def sizes_for(kind: str, **config: Any) -> dict[str, Any]:
    """SIZES and what is given; of a type with groups never fewer groups than heads in the cache, which are as many."""
    token_lambda = {"token_lambda": True} if isinstance(kind, TokenLambda) else {}
    sizes = fitted(kind, {**SIZES, **token_lambda, **config})
    if ATTENTION_TYPES[kind].grouped:
        cached = (sizes["num_key_value_heads"] or sizes["num_attention_heads"]) // 2
        sizes["num_key_value_heads"] = cached * (2 if kind in PAIRED else 1)
        sizes["num_noise_heads"] = config.get("num_noise_heads", max(SIZES["num_noise_heads"], cached))
    return sizes


def sharpen(model: nn.Module) -> None:
    """Make attention peaked and give every parameter a value that shows where it went."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # In float64, where torch's draws do not depend on the processor.
            if parameter.dim() == 2:
                gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.0
                draw_normal(parameter, gain if "embed" in name else gain * parameter.shape[1] ** -0.5)
            elif "lam." in name or "lambda_" in name:
                draw_normal(parameter, 0.6)
            else:
                parameter.copy_(torch.rand(parameter.shape, dtype=torch.float64) + 0.5)


def make(
    kind: str = "diff", dtype: torch.dtype = torch.float64, sharp: bool = True, **config: Any
) -> DiffTransformerForCausalLM:
    """A model in evaluation mode, the same weights every time.

    At the usual initial weights attention is nearly uniform and most mistakes pass; here logits of the attention have a
    standard deviation of about 4. λ of the two layers becomes 0.52 and 1.26; of "diff_grouped", whose W_O is larger,
    1.19 and 0.41. With a λ of each token it lies between 0 and 1, and the seed is one of those that half precision is
    not hard on.
    """
    of_tokens = isinstance(kind, TokenLambda) or ATTENTION_TYPES[kind].latent
    torch.manual_seed(45 if of_tokens else 44 if ATTENTION_TYPES[kind].grouped else 41)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes_for(kind, **config)))
    if sharp:
        sharpen(model)
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    """Random tokens, 0 left out (it is the padding of these tests)."""
    return torch.randint(1, SIZES["vocab_size"], (batch, length))


# How many eps of its dtype an answer may be off, relative to the largest entry. Logits of the attention reach about 20:
# rounding them moves its weights by some 10 eps, the rest of a layer adds as much, and the second layer multiplies
# what the first one did by the size of its logits again.
ROUNDINGS = 256


def check_rounding(answer: Tensor, expected: Tensor, least: float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Fails if any entry is off by more than rounding in `dtype`, the answer's, explains.

    Rounding is relative to the largest expected entry, or to `least` where that is larger.
    """
    assert answer.shape == expected.shape
    eps = torch.finfo(dtype or answer.dtype).eps
    limit = eps * ROUNDINGS * max(least, expected.abs().max().item())
    error = (answer.double() - expected.double()).abs().max().item()
    assert error <= limit, f"error {error:.3g} over the limit {limit:.3g}"


def answers(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """A loss, and the gradient of every parameter that has one."""
    model.zero_grad()
    loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check_answers(computed: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Fails if any of :func:`answers` is off by more than rounding explains, or nothing is expected of it."""
    assert computed.keys() == expected.keys()
    for name, value in expected.items():
        assert value.any(), name
        least = max(1.0, 4 * value.abs().max().item())  # the terms of a gradient's sums may cancel
        check_rounding(computed[name], value.to(computed[name].dtype), least=least, dtype=dtype)
