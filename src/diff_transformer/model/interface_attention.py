"""Makes attention layers as transformers calls them, with one call through its attention interface for each layer,
and their masks.

The cache holds H_kv heads of keys [k1; k2] and values, both 2d wide (DIFF), so any cache or server that holds Llama's
holds ours. Our own implementations receive the queries as they are; for every other one a zero stands beside each query
(:func:`zero_padded`), which makes the call an ordinary one. Ours and "eager" receive λ and subtract; after every other
one the outputs of the two maps are subtracted here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    create_bidirectional_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_attention_forward

from diff_transformer.attention_types import ATTENTION_OPTIONS, ATTENTION_TYPES, LATENT_SIZES
from diff_transformer.model.cache import DiffCache, given_cache
from diff_transformer.model.configuration import DiffTransformerConfig
from diff_transformer.model.documents import attend_by_document
from diff_transformer.nn import Attention
from diff_transformer.ops import diff_attention_maps
from diff_transformer.ops.attention_request import check_dense, is_block_mask, is_floating
from diff_transformer.ops.backends import BACKENDS
from diff_transformer.ops.packed import unpack

# "diff_attention" lets the operator choose its backend; "diff_attention_blockwise" and so on name one.
OPERATOR_IMPLEMENTATION = "diff_attention"
OPERATOR_IMPLEMENTATIONS = {"diff_attention": "auto"} | {f"diff_attention_{name}": name for name in BACKENDS}

# Arguments of a model of transformers, or of its caller, that change the numbers and are not computed here: those that
# SDPA's forward does not compute either (a cap of the scores, sinks, the keys that a sparse layer has chosen), and
# those that it does.
_BEYOND_SDPA = ("softcap", "s_aux", "sinks", "indices", "block_indices")
_KNOWN_TO_SDPA = ("position_bias", "cache")


def attends_by_document(config: PreTrainedConfig) -> bool:
    """Return whether a model, as it is now, is cheaper on documents packed into one row than on a batch.

    That is so with our own implementations, which make no mask of them.
    """
    return isinstance(config, DiffTransformerConfig) and config._attn_implementation in OPERATOR_IMPLEMENTATIONS


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set a model to an attention implementation, and afterwards to the one that it had."""
    before = model.config._attn_implementation
    try:
        if name != before:
            model.set_attn_implementation(name)
        yield
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)


class AttentionMaps(NamedTuple):
    """The maps of one layer, each (B, H, N, S) in float32; without A1 and A2 for ordinary attention.

    Attributes:
        first: A1, or None.
        second: A2, or None.
        difference: A1 − λA2, or the ordinary map.

    Examples:
        >>> AttentionMaps(None, None, difference=torch.eye(2)).first is None
        True
    """

    first: Tensor | None
    second: Tensor | None
    difference: Tensor


def zero_padded(queries: Tensor, ratio: int = 1) -> Tensor:
    """Pad (B, N, (r + 1)·G, d) to the one call's queries (B, (r + 1)·G, N, 2d): r heads [q1; 0], then one [0; q2]."""
    signal, noise = queries.unflatten(2, (-1, ratio + 1)).split((ratio, 1), dim=3)
    width = queries.shape[-1]
    padded = torch.cat((F.pad(signal, (0, width)), F.pad(noise, (width, 0))), dim=3)  # (B, N, G, r + 1, 2d)
    return padded.flatten(2, 3).transpose(1, 2)


def subtracted(results: Tensor, lam: Tensor, ratio: int, signal_weight: Tensor | None = None, dim: int = 2) -> Tensor:
    """Combine the one call's outputs (B, N, (r + 1)·G, dv) into w A1 V − λ A2 V of each head, (B, N, H, dv).

    ``lam`` and the weight w, 1 if it is None, are broadcastable to (B, H, N). With ``dim`` 1 heads stand before N, as
    in maps (B, (r + 1)·G, N, S).
    """
    signal, noise = results.unflatten(dim, (-1, ratio + 1)).split((ratio, 1), dim=dim + 1)

    def as_heads(weight: Tensor) -> Tensor:
        return weight.movedim(1, dim).unflatten(dim, (-1, ratio)).unsqueeze(-1)

    if signal_weight is not None:
        signal = as_heads(signal_weight) * signal
    difference = signal - (lam if lam.dim() == 0 else as_heads(lam)) * noise
    return difference.to(results.dtype).flatten(dim, dim + 1)


def eager_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    lam: Tensor | None = None,
    signal_weight: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend as Llama's "eager"; with λ, subtract the weights of the one call and make the heads from the difference.

    So a gradient reaches the weights that are returned, as it does Llama's. Arguments, results and errors are otherwise
    those of :func:`operator_attention_forward`, with the queries of the one call.
    """
    _refuse_given("eager", _KNOWN_TO_SDPA, kwargs)
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # Llama's is added
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, hidden)
    heads, weights = llama_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if lam is None:
        return heads, weights
    difference = subtracted(weights, lam, module.ratio, signal_weight, dim=1)
    values = value.repeat_interleave(difference.shape[1] // value.shape[1], dim=1)  # (B, H, S, dv)
    times = 2 if module.pairs_kv_heads else 1  # maps as Llama counts them, (B, A, N, S)
    difference = difference.repeat_interleave(times, dim=1)
    heads = difference @ values.unflatten(-1, (times, -1)).transpose(2, 3).flatten(1, 2)  # (B, A, N, d)
    return module.transform_heads(heads.transpose(1, 2).flatten(2).unflatten(2, (-1, value.shape[-1]))), difference


def _refuse_given(implementation: str, unknown: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    for name in unknown:
        if (value := kwargs.get(name)) is not None:
            got = value if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} changes the numbers, and attn_implementation {implementation!r} does not compute it here: it "
                f"must be left out, or the implementation be one that the model computes it with, got {got}."
            )


class InterfaceAttention(Attention):
    """Mixin: ``forward`` with transformers' signature, attending through transformers' attention interface.

    Servers read the source of ``forward`` for the interface's call and its ``scaling``.
    """

    def __init__(self, config: DiffTransformerConfig, layer: int) -> None:
        sizes = config.hidden_size, config.num_attention_heads, layer, config.num_key_value_heads, config.head_dim
        known = layer_settings(config, layer)
        super().__init__(*sizes, **{name: known[name] for name in config.spec.settings})
        self.config = config
        self.is_causal = config.is_causal  # which attention implementations read where there is no mask

    def forward(  # type: ignore[override]  # transformers' signature and pair of results
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, N, D), and with ``output_attentions`` the attention weights (B, A, N, S), else None.

        Weights are A1 − λA2, or the one map of ordinary attention, counted as Llama's are: map a weighs the value
        channels a·d … (a + 1)·d. The two of one head of DIFF are the same. Groups have A − G heads in all.
        """
        gives_weights = kwargs.setdefault("output_attentions", self.config.output_attentions)
        queries, keys, values = self.project(hidden_states, position_embeddings)
        own = values
        implementation = self.config._attn_implementation
        takes_pairs = implementation in OPERATOR_IMPLEMENTATIONS
        cache = given_cache(past_key_values, kwargs)
        if cache is not None:
            options: dict[str, Any] = {"kwargs": kwargs} if isinstance(cache, PagedAttentionCache) else {}
            if takes_pairs and self.caches_values and isinstance(cache, DiffCache):
                options = {"packed": True}
            keys, values = cache.update(keys, values, self.layer_idx, **options)  # a paged one adds to kwargs
        queries, keys, values = self.resolve_latents(queries, keys, values)

        lam, count = self.lambdas(hidden_states), queries.shape[2] // (self.ratio + 1) * self.ratio
        if lam is not None and lam.dim() > 0 and lam.shape[1] not in (1, count):
            raise ValueError(
                f"this rank has {count} heads and λ of {lam.shape[1]}: a plan of tensor parallelism must split W_λ "
                "(lambda_proj) by rows as W_Q, which the plan of the configuration does."
            )
        if not takes_pairs:  # ours refuses more
            _refuse_given(implementation, _BEYOND_SDPA, kwargs)
        pads = self.pairs_kv_heads and not takes_pairs
        query = zero_padded(queries, self.ratio) if pads else queries.transpose(1, 2)
        if not takes_pairs and keys.shape[1] == 1:  # others count a group's queries by num_key_value_groups
            keys, values = (x.expand(-1, query.shape[1] // self.num_key_value_groups, -1, -1) for x in (keys, values))
        subtracts = takes_pairs or implementation == "eager"
        signal_weight = self.signal_weights(hidden_states)
        if subtracts:
            kwargs |= {"lam": lam, "signal_weight": signal_weight}

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        heads, weights = attention_interface(
            self,
            query,
            keys,
            values,
            attention_mask,
            dropout=self.active_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        if not takes_pairs:
            heads = heads.reshape(*hidden_states.shape[:2], -1, heads.shape[-1] if subtracts else values.shape[-1])
        if lam is None:
            heads = self.transform_heads(heads)
        elif not subtracts:
            heads, weights = self.transform_heads(subtracted(heads, lam, self.ratio, signal_weight)), None
        return self.output(hidden_states, heads, own), weights if gives_weights else None

    @property
    def sliding_window(self) -> int | None:
        """How many tokens back the layer looks, the token itself included; None for all.

        The mask says so already. Kernels that take no mask, and paged caches, read this.
        """
        window = self.config.sliding_window
        if window is None or self.config.types_of_layers()[self.layer_idx] != "sliding_attention":
            return None
        return window


def layer_settings(config: DiffTransformerConfig, layer: int) -> dict[str, Any]:
    """Return a configuration's settings of a layer, counted from 1, beside the sizes: each type takes some of them."""
    return {
        "lambda_init": config.lambda_init_of(layer),
        "norm_eps": config.norm_eps_in_attention,
        "headwise_norm": config.has_headwise_norm,
        **{option: getattr(config, name) for name, option in ATTENTION_OPTIONS.items()},
        "rotary": layer - 1 not in (config.layers_without_rotary or ()),
        "heads": None if config.dex_heads is None else config.dex_heads[layer - 1],
        "lambda_start": config.dex_lambda_start,
        "num_noise_heads": config.num_noise_heads,
        "token_lambda": config.token_lambda,
        "dual_lambda": config.dual_lambda,
        **{name: getattr(config, name) for name in LATENT_SIZES},
    }


@cache
def interface_class(layer_class: type[Attention]) -> type[InterfaceAttention]:
    """Return a layer's class behind transformers' interface, as ``InterfaceDiffAttention`` of ``DiffAttention``."""
    members = {"__module__": __name__, "__doc__": f":class:`{layer_class.__name__}` in a transformers model."}
    return type(f"Interface{layer_class.__name__}", (InterfaceAttention, layer_class), members)


def __getattr__(name: str) -> Any:
    """Return the classes that :func:`interface_class` makes, by name: a pickled model asks for them so."""
    for spec in ATTENTION_TYPES.values():
        if (layer_class := interface_class(spec.layer_class())).__name__ == name:
            return layer_class
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def operator_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    lam: Tensor | None = None,
    signal_weight: Tensor | None = None,
    sliding_window: int | None = None,
    maps: list[AttentionMaps] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    *,
    backend: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by our operator behind transformers' attention interface; without λ ordinary attention, mostly by SDPA.

    Query, key and value are (B, heads, N, d), those of a group side by side, and (B, H_kv, S, width), as cached, also
    in eight bits. The mask is boolean or additive (B, 1, N, S), or None for plain causality, or for nothing hidden if
    ``module.is_causal`` is False. ``lam`` and ``signal_weight`` are broadcastable to (B, H, N), and each layer's
    attention maps are appended to ``maps``. Without a mask ``cu_seq_lens_q`` tells documents apart. ``kwargs`` are
    ``is_causal`` and ``output_attentions``.

    Returns:
        (B, N, H, dv), for differential attention normalised if the layer has a headwise norm, and the attention weights
        (B, A, N, S) with ``output_attentions``, else None.

    Raises:
        ValueError: an argument that changes the numbers and is not computed here.
    """
    n, s = query.shape[2], key.shape[2]
    cu_seqlens = cu_seq_lens_q if attention_mask is None else None
    gives_maps = kwargs.pop("output_attentions", False) or maps is not None
    name = OPERATOR_IMPLEMENTATION if backend == "auto" else f"{OPERATOR_IMPLEMENTATION}_{backend}"
    _refuse_given(name, (*_BEYOND_SDPA, *_KNOWN_TO_SDPA), kwargs)
    wanted = kwargs.get("is_causal")  # None, as transformers passes on what a caller leaves open, is the layer's own
    wanted = getattr(module, "is_causal", True) if wanted is None else wanted
    is_causal = attention_mask is None and n > 1 and wanted
    if key.dtype == torch.int8 and (lam is None or gives_maps):
        key, value = unpack(key, query.dtype), unpack(value, query.dtype)
    if is_causal and s > n:
        # transformers leaves the mask out here only while filling an empty static cache, whose later slots are unused.
        key, value = key[:, :, :n], value[:, :, :n]
    window = sliding_window if is_causal else None  # else it is in the mask: see operator_mask
    settings: dict[str, Any] = {"is_causal": is_causal, "attn_mask": attention_mask, "scale": scaling}
    settings |= {"window": window, "cu_seqlens": cu_seqlens}
    if lam is not None:
        q = query.unflatten(1, (-1, module.ratio + 1))
        k = key if key.dtype == torch.int8 else module.split_keys(key)
        settings["signal_weight"] = signal_weight
        out = module.difference(q, k, value, lam, **settings, dropout_p=dropout, backend=backend)
    elif cu_seqlens is not None:
        out = attend_by_document(
            module, query, key, value, cu_seqlens, scaling, is_causal, window, max_length_q, dropout
        )
    else:
        attend = flex_attention_forward if is_block_mask(attention_mask) else sdpa_attention_forward
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        out, _ = attend(module, query, key, value, attention_mask, **kwargs)
    if not gives_maps:
        return out, None
    if lam is None:  # one map: the first of two equal ones
        q, k = query.unsqueeze(2).expand(-1, -1, 2, -1, -1), key.unsqueeze(2)
    first, second, difference = diff_attention_maps(q, k, 0.0 if lam is None else lam, **settings)
    if s > key.shape[2]:  # slots that nobody looks at, so that the maps are as wide as other implementations'
        first, second, difference = (F.pad(a, (0, s - key.shape[2])) for a in (first, second, difference))
    if maps is not None:
        maps.append(AttentionMaps(None, None, first) if lam is None else AttentionMaps(first, second, difference))
    return out, difference.repeat_interleave(2 if getattr(module, "pairs_kv_heads", False) else 1, dim=1)


def operator_mask(**arguments: Any) -> Tensor | None:
    """Make transformers' boolean mask (B, 1, N, S), or None if our operator hides all of it by itself.

    For tokens that begin a sequence it hides the future and all that a sliding window leaves behind: no mask of N × N.

    Raises:
        ValueError: the configuration of a model that computes its attention itself, and would add the mask to it.
    """
    config = arguments["config"]
    if not torch.compiler.is_compiling() and _attend_themselves(type(config).__module__):
        raise ValueError(
            f"models of {type(config).__name__} compute attention themselves: attn_implementation must be 'eager', got "
            f"{config._attn_implementation!r}."
        )
    offset = arguments.get("q_offset")  # a tensor, not to be read while it is traced, where a cache is static
    begins = isinstance(offset, int) and offset == 0 and arguments["q_length"] == arguments["kv_length"]
    causal = arguments.get("allow_is_causal_skip", False)  # a window in both directions is not the operator's
    # Any model of transformers may be set to our implementation.
    spec = ATTENTION_TYPES.get(getattr(config, "attention_type", ""))
    if begins and causal and spec is not None and spec.differential:
        arguments = {**arguments, "local_size": None}
    return sdpa_mask(**arguments)


@cache
def _attend_themselves(configuration: str) -> bool:
    """Return whether the models of a configuration's module do not call the attention interface (BLOOM, LED …)."""
    name = configuration.replace(".configuration_", ".modeling_")
    members = vars(sys.modules[name]) if name in sys.modules else {}
    own = [member for member, value in members.items() if getattr(value, "__module__", None) == name]
    return any("Attention" in member for member in own) and "ALL_ATTENTION_FUNCTIONS" not in members


def check_mask_kind(attention_mask: Any) -> None:
    """Refuse a caller's mask, or masks by name, of a kind that nobody reads.

    Raises:
        TypeError: a tensor that does not hold its own numbers.
        ValueError: four axes of integers or float8.
    """
    if isinstance(attention_mask, dict):
        for mask in attention_mask.values():
            check_mask_kind(mask)
    if isinstance(attention_mask, Tensor):
        check_dense("attention_mask", attention_mask)
        if attention_mask.dim() == 4 and attention_mask.dtype != torch.bool and not is_floating(attention_mask):
            raise ValueError(
                "attention_mask of four axes must be boolean, or added to the scores and floating of 16 bits or more, "
                f"got {attention_mask.dtype}."
            )


def encoder_mask(
    config: DiffTransformerConfig, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor | None
) -> Any:
    """Make every layer's mask in the form that the attention implementation takes, or None if nothing is hidden.

    Padding, on either side, is hidden. Without a mask of tokens, positions that begin anew in a row begin another
    document, which sees itself alone; transformers reads that off the positions of causal models only.

    ``inputs_embeds`` is (B, N, D). ``attention_mask`` is (B, N), 0 at padding; or (B, 1, N, N) and BlockMasks, which
    stay as they are; or None. ``position_ids`` is (B, N) or (1, N), or None.
    """
    documents = None
    if attention_mask is None and position_ids is not None:
        documents = find_packed_sequence_indices(position_ids.expand(inputs_embeds.shape[0], -1))
    return create_bidirectional_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        and_mask_function=None if documents is None else packed_sequence_mask_function(documents),
    )


def register_attention() -> None:
    """Make our operator known to transformers under its own names, each with its mask function."""
    for name, backend in OPERATOR_IMPLEMENTATIONS.items():
        AttentionInterface.register(name, partial(operator_attention_forward, backend=backend))
        AttentionMaskInterface.register(name, operator_mask)


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None
) -> list[AttentionMaps]:
    """Return the maps of every layer for one batch, whatever attention implementation the model is set to.

    All of them are held at once, three numbers for each layer, head, query and key. A row is one document.

    Args:
        model: one of ours, of any attention type.
        input_ids: (B, N) tokens.
        attention_mask: (B, N), 0 at padding, or None.

    Returns:
        One :class:`AttentionMaps` a layer.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> (layer,) = attention_maps(DiffTransformerForCausalLM(config), torch.arange(10)[None])
        >>> layer.difference.shape
        torch.Size([1, 2, 10, 10])
    """
    maps: list[AttentionMaps] = []
    name = model.config._attn_implementation if attends_by_document(model.config) else OPERATOR_IMPLEMENTATION
    with attention_implementation(model, name):
        model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, maps=maps)
    return maps
