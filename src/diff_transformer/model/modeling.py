"""Defines the models for transformers: their common base class, the base model and the language model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from diff_transformer.model.cache import CACHE_NAME, DiffCache, given_cache
from diff_transformer.model.chunked_loss import chunked_cross_entropy
from diff_transformer.model.configuration import DiffTransformerConfig, viewed_config
from diff_transformer.model.documents import check_cu_seqlens, document_positions
from diff_transformer.model.interface_attention import (
    OPERATOR_IMPLEMENTATION,
    OPERATOR_IMPLEMENTATIONS,
    InterfaceAttention,
    attends_by_document,
    attention_implementation,
    check_mask_kind,
    encoder_mask,
    interface_class,
)
from diff_transformer.model.parallel_plan import check_ranks
from diff_transformer.nn import (
    AnnealedLambda,
    DecoderLayer,
    DexCorrection,
    DualLambda,
    KeepsFloat32,
    Lambda,
    PolyNorm,
    RMSNorm,
    set_dex_progress,
)
from diff_transformer.nn.layers import draw_normal


class DiffTransformerDecoderLayer(GradientCheckpointingLayer, DecoderLayer):
    """:class:`DecoderLayer` over transformers' attention interface."""

    def __init__(self, config: DiffTransformerConfig, layer: int) -> None:
        attention = interface_class(config.spec.layer_class())(config, layer)
        sizes = config.hidden_size, config.intermediate_size
        super().__init__(attention, *sizes, config.rms_norm_eps, config.hidden_act)

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        output, _ = self.self_attn(normed, **kwargs)
        return output


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """Base of the models: initial weights, supported features, our operator as the default attention."""

    config_class = DiffTransformerConfig
    config: DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: tuple[str, ...] = ("DiffTransformerDecoderLayer",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012  # transformers reads a plain dict
        "hidden_states": DiffTransformerDecoderLayer,
        "attentions": InterfaceAttention,
    }

    def __init__(self, config: DiffTransformerConfig, *args: Any, **kwargs: Any) -> None:
        # A model is built from the configuration itself, also where it gets the view that get_text_config() returns.
        config = viewed_config(config)
        config.check()
        super().__init__(config, *args, **kwargs)
        # transformers takes every name for one that the model has, so it depends on the attention type.
        self._keep_in_fp32_modules_strict = self.config.spec.float32_of(self.config)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return our operator unless another implementation is asked for.

        Raises:
            ValueError: one that nobody has registered, or that cannot run here.
        """
        requested = requested_attention or OPERATOR_IMPLEMENTATION
        known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
        if requested not in known and "/" not in requested:  # a kernel of the Hub has its owner's name before a slash
            raise ValueError(
                f'Specified `attn_implementation="{requested}"` is not supported: attn_implementation must be one of '
                f"{', '.join(map(repr, known))}, got {requested!r}."
            )
        if self.config.spec.latent and ("flash" in requested or requested.startswith(("paged", "vllm"))):
            raise ValueError(
                f"attention_type {self.config.attention_type!r} caches latents, with keys wider than values: "
                f"attn_implementation must be 'eager', 'sdpa', 'flex_attention' or one of ours, got {requested!r}."
            )
        return super().get_correct_attn_implementation(requested, is_init_check)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights by transformers' rule, the same on every processor, and those of our modules by their own."""
        if isinstance(module, Lambda | nn.Linear | nn.Embedding):
            std = Lambda.STD if isinstance(module, Lambda) else self.config.initializer_range
            if getattr(module, "adds_to_residual", False) and self.config.residual_initializer_range is not None:
                std = self.config.residual_initializer_range
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    init.zeros_(parameter)
                elif not getattr(parameter, "_is_hf_initialized", False):  # else a checkpoint has filled it
                    draw_normal(parameter, std)
                    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                        init.zeros_(parameter[module.padding_idx])
        elif isinstance(module, RMSNorm | AnnealedLambda | DualLambda | DexCorrection | PolyNorm):
            module.reset_parameters()  # with the functions of torch.nn.init, which transformers keeps from loaded ones
        else:
            super()._init_weights(module)

    @property
    def _tp_size(self) -> int | None:
        """How many ranks share the heads. transformers sets it before it spreads the model and loads any weight."""
        return self.__dict__.get("_tensor_parallel_ranks")

    @_tp_size.setter
    def _tp_size(self, ranks: int | None) -> None:
        if ranks:
            check_ranks(ranks, self.config)
        self.__dict__["_tensor_parallel_ranks"] = ranks

    def lambdas(self) -> list[float] | None:
        """Return λ of each layer as it is now; None if no layer has one ("softmax", or λ of each token).

        For "dex" layers without a corrected head are left out.
        """
        # From the top: a wrapper of PEFT's (modules_to_save) in the place of a module gives the copy that is in use.
        layers = [layer.self_attn for layer in self.base_model.layers if hasattr(layer, "self_attn")]
        owners = [getattr(layer, "dex", layer) for layer in layers]
        values = [owner.lam().item() for owner in owners if getattr(owner, "lam", None) is not None]
        return values or None

    def set_dex_progress(self, fraction: float) -> None:
        """Set how far the annealing of λ is, 0 … 1: see :func:`diff_transformer.nn.set_dex_progress`.

        Raises:
            ValueError: the model has nothing to anneal, or a fraction that is not in 0 … 1.
        """
        if not self.config.spec.corrects_heads:
            raise ValueError(
                f"only attention_type 'dex' anneals its λ, and this model's is {self.config.attention_type!r}."
            )
        set_dex_progress(self, fraction)


class DiffTransformerRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, whose frequencies keep their values in casts, on "meta" and in ``to_empty``: no checkpoint has them."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        if config.spec.latent:  # whose queries are turned in part
            config = copy(config)
            config.head_dim = config.qk_rope_head_dim
        with torch.device("cpu"):
            super().__init__(config)
        self.to(torch.get_default_device())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DiffTransformerRotaryEmbedding":
        for name, frequencies in self._buffers.items():
            if frequencies is not None and (device := fn(frequencies).device).type != "meta":
                self._buffers[name] = frequencies.to(device)
        return self


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """Embedding, decoder layers and final norm.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerModel(config)(torch.arange(10)[None]).last_hidden_state.shape
        torch.Size([1, 10, 32])
    """

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        config = self.config
        self.padding_idx = config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [DiffTransformerDecoderLayer(config, layer) for layer in range(1, config.num_hidden_layers + 1)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DiffTransformerRotaryEmbedding(config)
        self.gradient_checkpointing = False
        # FSDP wants one dtype in a unit, so what stays in float32 is a unit to accelerate and the Trainer.
        owners = (module for module in self.modules() if isinstance(module, KeepsFloat32) and module._parameters)
        self._no_split_modules = (*self._no_split_modules, *sorted({type(module).__name__ for module in owners}))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of every token.

        Args:
            input_ids: (B, N) tokens, or ``inputs_embeds`` (B, N, D) in their place.
            attention_mask: (B, S), 0 at padding; or an attention mask (B, 1, N, S), boolean (True = may attend),
                additive, or a BlockMask of torch; or such masks by type of layer, as ``generate`` has.
            position_ids: (B, N); counted on from the cached tokens unless given. Without a mask and a cache, positions
                that begin anew in a row begin another document, which sees itself alone.
            past_key_values: a cache of transformers' (``cache`` as of 5.24); encoders (``is_causal`` False) have none.
            use_cache: whether to return one.
            kwargs: ``cu_seq_lens_q`` and its companions, for documents packed into one row (B = 1): see
                :mod:`diff_transformer.model.documents`. With our own implementations no mask or cache is made.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``, or another shape of them; documents that
                do not fit the rest; two caches, or one for an encoder; a context without ``position_ids``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given.")
        if position_ids is None and kwargs.get("context") is not None:
            raise ValueError(
                "with context (context parallelism) position_ids must be given: this rank's, by Context.own."
            )
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] == 0:
            got = tuple(inputs_embeds.shape if input_ids is None else input_ids.shape)
            raise ValueError(f"input_ids must be (B, N), or inputs_embeds (B, N, D), with N of 1 or more, got {got}.")
        whole = inputs_embeds
        if position_ids is not None and position_ids.shape[-1] > whole.shape[1]:  # this rank has a part
            whole = whole[:, :1].expand(-1, position_ids.shape[-1], -1)
        check_mask_kind(attention_mask)
        past_key_values = given_cache(past_key_values, kwargs)
        # That of continuous batching is read through masks of its own, with is_causal=False.
        if not (past_key_values is None or self.config.is_causal or isinstance(past_key_values, PagedAttentionCache)):
            raise ValueError(
                "an encoder (is_causal False) sees all tokens at once and takes no cache, got a "
                f"{type(past_key_values).__name__}."
            )
        # Fewer layers than there are where generate lets the first ones speculate ("assistant_early_exit").
        layer_types = self.config.types_of_layers()[: len(self.layers)]
        cu_seqlens, ends = None, kwargs.get("cu_seq_lens_q")
        has_documents = ends is not None or kwargs.get("cu_seq_lens_k") is not None
        if has_documents and attends_by_document(self.config):  # and needs no mask
            cu_seqlens = check_cu_seqlens(whole, attention_mask, past_key_values, **kwargs)
        # A mask of tokens may be wider than they are, as Llama's: a cache, even an empty one, tells which are there.
        # Where there is no mask, documents packed into a row are read from the positions, unless there is a cache.
        past_of_caller = past_key_values
        if use_cache and past_key_values is None and cu_seqlens is None and self.config.is_causal:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None and past_of_caller is None and ends is not None:
            position_ids = document_positions(ends, inputs_embeds.shape[1])
        if isinstance(attention_mask, dict):
            masks = attention_mask
        elif cu_seqlens is not None:
            masks = dict.fromkeys(layer_types)
        # A causal model that is called with is_causal=False may have windows: transformers' masks look both ways then.
        elif not self.config.is_causal and "sliding_attention" not in layer_types:
            mask = encoder_mask(self.config, whole, attention_mask, position_ids)
            masks = dict.fromkeys(layer_types, mask)
        else:
            masks = {
                layer_type: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[layer_type](
                    config=self.config,
                    inputs_embeds=whole,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    **{CACHE_NAME: past_of_caller if attention_mask is None else past_key_values},
                )
                for layer_type in dict.fromkeys(layer_types)
            }
        # Only now: the masks read documents from the positions that the caller gave.
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states = inputs_embeds
        for layer_type, layer in zip(layer_types, self.layers, strict=False):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE_NAME: past_key_values},
                **kwargs,
            )
        return BaseModelOutputWithPast(self.norm(hidden_states), past_key_values)


class DiffTransformerLanguageModel(DiffTransformerPreTrainedModel):
    """Base of the models that are trained on text: :class:`DiffTransformerModel` and an output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  # transformers reads a plain dict
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012  # as above
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # noqa: RUF012  # as above
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012  # as above

    def __init__(self, config: DiffTransformerConfig) -> None:
        if config.is_causal != isinstance(self, GenerationMixin):
            raise ValueError(
                f"the configuration of {type(self).__name__} must have is_causal {not config.is_causal}, got "
                f"{config.is_causal} (DiffTransformerForMaskedLM is the encoder; DiffTransformerForCausalLM is not)."
            )
        super().__init__(config)
        self.model = DiffTransformerModel(self.config)
        self.vocab_size = self.config.vocab_size
        self.lm_head = nn.Linear(self.config.hidden_size, self.vocab_size, bias=False)
        self.post_init()

    def logits_and_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        logits_to_keep: int | Tensor,
        chunked_loss: bool,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits that are asked for, and the loss if there are labels: by chunks without any logits."""
        if labels is not None and kwargs.get("context") is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "with context (context parallelism) labels must be shifted over the whole sequence: give this rank's "
                "part of the shifted ones, by Context.own, as shift_labels beside labels."
            )
        if chunked_loss and labels is not None:
            return None, chunked_cross_entropy(self.lm_head, hidden_states, labels, self.config.vocab_size, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, keep, :])
        if labels is None:
            return logits, None
        return logits, self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)


class DiffTransformerForCausalLM(DiffTransformerLanguageModel, GenerationMixin):
    """The language model: :class:`DiffTransformerModel` and an output head.

    Raises:
        ValueError: the configuration of an encoder.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForCausalLM(config)(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 64])
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        chunked_loss: bool = False,
        cache: Any = None,  # transformers' pipeline passes on what the signature names
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the next token, and the loss if ``labels`` are given.

        The other arguments are those of :meth:`DiffTransformerModel.forward`.

        Args:
            labels: (B, N), shifted inside; −100 is left out. The mean over tokens, or the sum divided by
                ``num_items_in_batch`` if that is given.
            logits_to_keep: how many last positions (0 for all), or which, get logits.
            chunked_loss: compute the loss alone, a chunk of tokens at a time; the logits, with a large vocabulary many
                times as large as all else, are None then.

        Raises:
            ValueError: ``chunked_loss`` without labels.
        """
        if chunked_loss and labels is None:
            raise ValueError("chunked_loss=True gives a loss and no logits, so labels must be given, got None.")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **({} if cache is None else {"cache": cache}),
            **kwargs,
        )
        logits, loss = self.logits_and_loss(outputs.last_hidden_state, labels, logits_to_keep, chunked_loss, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Make the cache that ``generate`` is asked for, and one that grows in place if that is a DynamicCache.

        "quantized" is ours in eight bits, unless a ``cache_config`` says how one of transformers' is to be.
        """
        given, bits = model_kwargs.get(CACHE_NAME), None
        quantized = generation_config.cache_implementation == "quantized" and not generation_config.cache_config
        if given is None and quantized:
            generation_config, bits = copy(generation_config), 8
            generation_config.cache_implementation = None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        made: Any = model_kwargs.get(CACHE_NAME)
        if given is None and type(made) is DynamicCache and not made.offloading:
            # Drafts of transformers 5.4 get one without a configuration, so without windows, which cannot be cropped.
            config = self.config if made.layers else None
            cache = model_kwargs[CACHE_NAME] = DiffCache(config, generation_config.max_length - 1, bits)
            if any(getattr(layer, "record_past", False) for layer in made.layers):  # of a draft, to be cut off again
                cache.activate_past_recording()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> ContinuousBatchingManager:
        """Make transformers' manager of requests, for ``generate_batch``.

        transformers reads and writes its paged cache in "sdpa", "paged|eager" or FlashAttention alone, so our own
        operator gives way to one of those, in which a layer makes its one ordinary call. ``generate_batch`` and
        ``continuous_batching_context_manager`` go back to it afterwards; whoever calls this method does so with
        ``set_attn_implementation``.

        Raises:
            NotImplementedError: a cache of latents, which is not paged.
        """
        if self.config.spec.latent:
            raise NotImplementedError(
                "continuous batching pages keys and values of one width, which attention_type "
                f"{self.config.attention_type!r} does not cache."
            )
        if self.config._attn_implementation in OPERATOR_IMPLEMENTATIONS:
            self.set_attn_implementation("sdpa")
        return super().init_continuous_batching(*args, **kwargs)

    @contextmanager
    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Iterator[ContinuousBatchingManager]:
        """Enter transformers' own manager, and restore the attention implementation afterwards."""
        with (
            attention_implementation(self, self.config._attn_implementation),
            super().continuous_batching_context_manager(*args, **kwargs) as manager,
        ):
            yield manager
