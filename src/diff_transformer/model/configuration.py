"""Defines the configuration of all attention types, and its view with the sizes of a layer's one attention call.

The baseline of a DIFF Transformer is the Transformer whose configuration differs in ``attention_type`` alone.
"""

import math
import os
from copy import copy
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diff_transformer._version import INSTALL, __version__
from diff_transformer.attention_types import (
    ATTENTION_OPTIONS,
    ATTENTION_TYPES,
    LATENT_SIZES,
    SHARED_PARAMETERS,
    AttentionType,
    head_dim,
    latent_sizes,
)
from diff_transformer.model import parallel_plan  # noqa: F401  # whoever reads a plan finds the style that it names
from diff_transformer.nn.attention import checked_key_heads
from diff_transformer.nn.dex import check_chosen_heads
from diff_transformer.nn.layers import constant_lambda, feed_forward_class
from diff_transformer.ops import lambda_init_schedule
from diff_transformer.utils.suggestions import quoted


class CacheView:
    """Mixin of a live view of a configuration, in which only the three head sizes differ.

    A view shares its attributes with the configuration it was made from: an attribute written to either is read from
    both. It equals that configuration, is saved and printed as that configuration, and is copied and pickled with it.
    The three sizes are computed, so they are set on the configuration itself.
    """

    __slots__ = ("_viewed",)

    _viewed: "DiffTransformerConfig"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an ordinary configuration: callers read defaults from ``type(view)()``."""
        return cls.__bases__[1](*args, **kwargs)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the one call."""
        return self._viewed.spec.query_heads(self._viewed)

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys, and of values, that a layer caches."""
        return 1 if self._viewed.spec.latent else self._viewed.spec.key_heads(self._viewed)

    @property
    def head_dim(self) -> int:
        """Width of each of them."""
        return self._viewed.spec.cached_width(self._viewed)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "CacheView":
        """Return the view itself: a view of a view would count twice."""
        return self

    def __eq__(self, other: object) -> bool:
        return self._viewed == viewed_config(other)

    __hash__ = None  # type: ignore[assignment]  # as every configuration of transformers, which can be written to

    def __copy__(self) -> "DiffTransformerConfig":
        return cache_view(copy(self._viewed))

    def __reduce__(self) -> tuple[Any, ...]:
        return cache_view, (self._viewed,)


# No functools.cache: torch.compile, which meets this where a model makes its own cache, warns of one.
_CLASSES: dict[type["DiffTransformerConfig"], type["DiffTransformerConfig"]] = {}


def cache_view_class(viewed: type["DiffTransformerConfig"]) -> type["DiffTransformerConfig"]:
    """Return the class of the views of one configuration class: a subclass of it, so that isinstance holds."""
    if viewed not in _CLASSES:
        # transformers makes a dataclass of every configuration class, which would get a comparison of its own.
        members = {"__module__": __name__, "__slots__": (), "__eq__": CacheView.__eq__, "__hash__": None}
        _CLASSES[viewed] = type(viewed.__name__, (CacheView, viewed), members)
    return _CLASSES[viewed]


def cache_view(config: "DiffTransformerConfig") -> "DiffTransformerConfig":
    """Return the view of a configuration; the configuration itself if the call has the sizes that it says."""
    if not config.spec.differential:
        return config
    view = object.__new__(cache_view_class(type(config)))
    # Not __init__, nor a copy: the view has the very dictionary of attributes that the configuration has.
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "_viewed", config)
    return view


def viewed_config(config: Any) -> Any:
    """Return the configuration a view was made from; anything else as it is."""
    return config._viewed if isinstance(config, CacheView) else config


@strict
class DiffTransformerConfig(PreTrainedConfig):
    """Sizes of a DIFF Transformer, its second version, or the parameter-matched Transformer.

    Args:
        attention_type: "diff" (Equations 1 to 3), "diff_grouped" (groups of heads that share the map which is
            subtracted: arXiv 2510.06949), "diff_v2" (the authors' second version), "diff_v3" (with two gates),
            "diff_v2_grouped" (groups that share keys, too), "gdla" (the same over a latent cache), "softmax" (the
            Transformer) or "dex" (the Transformer with corrected heads: arXiv 2505.16333).
        num_attention_heads: the Transformer's count A for every type; DIFF has A / 2 heads 2d wide, with groups A − G.
        num_key_value_heads: the Transformer's key/value heads, for grouped queries; A unless given, with groups 2G, or
            G where they share keys.
        num_noise_heads: for the grouped types, which need it, the number of groups G: A = (r + 1)·G query heads are r
            signal heads and one noise head in each group. Of "gdla" A / 2 unless given; other types leave it aside.
        head_dim: width d of a query or key; hidden_size / A unless given.
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: for "gdla", the widths of latents,
            parts of a query and values, by DeepSeek's names: see :class:`diff_transformer.nn.LatentDiffAttention`.
        token_lambda: for "diff_grouped", whether λ is a projection of the token with a sigmoid, one for each signal
            head, as "diff_v2" has it, and not one of the layer.
        dual_lambda: for "diff" and "diff_grouped", whether λ of a layer is exp(a) − exp(b) + λ_init of two numbers.
        lambda_init: "schedule" for 0.8 − 0.6·exp(−0.3·(l − 1)), or one constant for all layers.
        lambda_init_offset: number that the schedule adds to l, for checkpoints that count layers from another origin.
        headwise_norm: whether each head's output is normalised before the output projection (Equation 3); as the
            attention type has it unless given: "diff" has the norm, with its factor 1 − λ_init, and no other type.
        attention_bias, qk_norm, qk_clip, output_gate, exclusive_attention, attention_dropout: options of the layers'
            attention, see :class:`diff_transformer.nn.DiffAttention` (``bias``, ``exclusive`` and ``dropout`` there).
            None of them is the paper's, and "dex" has none.
        layers_without_rotary: numbers of the layers, counted from 0, that have no rotary embedding; not for "dex".
        dex_heads: for "dex", the corrected heads of each layer, ascending from 0; all of every layer unless given.
        dex_lambda_start: for "dex", λ_learn at the start; λ_init unless given.
        hidden_size, intermediate_size, num_hidden_layers, vocab_size, max_position_embeddings: sizes.
        rope_parameters: transformers' rotary settings, e.g. {"rope_type": "default", "rope_theta": 10000.0}.
        hidden_act: the feed-forward network's activation, "silu" (SwiGLU) or "poly_norm" (Motif's models).
        rms_norm_eps: eps of every norm, those inside attention included unless they have their own.
        attention_norm_eps: eps of the headwise norm and of the norms of queries and keys; rms_norm_eps unless given.
        initializer_range: standard deviation of the weight matrices at the start.
        residual_initializer_range: the same of the matrices whose outputs are added to the residual stream, W_O and
            W_down; initializer_range unless given. A small one lets narrow models begin sooner (docs/training.md).
        tie_word_embeddings: whether the output head shares the embedding's weight.
        sliding_window: how many tokens back a layer looks, the token itself included; None for all. Of every layer, or
            with ``layer_types`` (a list of "full_attention" and "sliding_attention") of those that say so.
        is_causal: whether a token sees only itself and those before it. False makes an encoder, in which every token
            sees all others: :class:`DiffTransformerForMaskedLM`, no cache, no sliding window.

    Raises:
        ValueError: sizes that do not fit each other, an unknown attention type or activation, a λ_init that is no
            number, a headwise norm of "dex", a sliding window of an encoder.

    Examples:
        >>> config = DiffTransformerConfig(attention_type="diff_v2", hidden_size=64, num_attention_heads=4)
        >>> config.head_dim, config.intermediate_size
        (16, 2048)
    """

    model_type = "diff_transformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  # the Trainer adds a list to it
    base_model_pp_plan = LlamaConfig.base_model_pp_plan  # the modules have Llama's names, and take and give the same

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    num_noise_heads: int | None = None
    token_lambda: bool = False
    dual_lambda: bool = False
    head_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    attention_type: str = "diff"
    lambda_init: float | int | str = "schedule"
    lambda_init_offset: int = 0
    headwise_norm: bool | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    qk_clip: bool = False
    output_gate: bool = False
    exclusive_attention: bool = False
    layers_without_rotary: list | None = None
    attention_dropout: float | int = 0.0
    dex_heads: list | None = None
    dex_lambda_start: float | int | None = None
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_norm_eps: float | None = None
    initializer_range: float = 0.02
    residual_initializer_range: float | None = None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    is_causal: bool = True
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("layer_types") is not None:
            self.layer_types = kwargs["layer_types"]
        self.check()
        if self.head_dim is None:
            self.head_dim = head_dim(self)
        # Programs that do not know the model read there which Auto classes load it: TRL, vLLM, and transformers itself
        # where this package has not been imported. A subclass with a model type of its own has code of its own.
        if self.model_type == DiffTransformerConfig.model_type:
            kwargs["auto_map"] = auto_map(self.is_causal)
        super().__post_init__(**kwargs)

    @property
    def spec(self) -> AttentionType:
        """The description of the attention type.

        Raises:
            ValueError: it is unknown, as `from_pretrained(…, attention_type=…)` may set it.
        """
        if self.attention_type not in ATTENTION_TYPES:
            raise ValueError(
                f"attention_type must be one of {', '.join(map(repr, ATTENTION_TYPES))}, got {self.attention_type!r}."
            )
        return ATTENTION_TYPES[self.attention_type]

    @property
    def has_headwise_norm(self) -> bool:
        """Whether the layers have a headwise norm, said so or not."""
        return self.spec.headwise_norm if self.headwise_norm is None else self.headwise_norm

    @property
    def has_token_lambda(self) -> bool:
        """Whether the layers have a λ for each token and head, a projection W_λ."""
        return self.spec.has_token_lambda(self)

    @property
    def angles_follow_length(self) -> bool:
        """Whether the angles of the rotary embedding depend on the largest position of the call."""
        return (self.rope_parameters or {}).get("rope_type") in ("dynamic", "longrope")

    @property
    def qk_head_dim(self) -> int | None:
        """Width of a query of latent attention, else None; transformers asks by it if cached keys and values differ."""
        return self.head_dim if self.spec.latent else None

    @property
    def norm_eps_in_attention(self) -> float:
        """eps of the norms inside attention, said so or not."""
        return self.rms_norm_eps if self.attention_norm_eps is None else self.attention_norm_eps

    def lambda_init_of(self, layer: int) -> float | str:
        """Return λ_init of a layer, counted from 1, as a layer takes it: "schedule" or a number."""
        if isinstance(self.lambda_init, str) and self.lambda_init_offset:
            return lambda_init_schedule(layer, self.lambda_init_offset)
        return self.lambda_init

    def types_of_layers(self) -> list[str]:
        """Return the type that transformers' caches and masks give each layer."""
        count, types = self.num_hidden_layers, getattr(self, "layer_types", None)
        if types is not None:
            return types[:count]
        return ["full_attention" if self.sliding_window is None else "sliding_attention"] * count

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """transformers' plan of tensor parallelism: the attention type's own, and Llama's for common modules."""
        ours, llama = self.spec.styles_of(self), LlamaConfig.base_model_tp_plan
        if self.has_headwise_norm:
            ours["head_norm"] = SHARED_PARAMETERS
        if self.qk_norm:
            ours |= {"q_norm": SHARED_PARAMETERS, "k_norm": SHARED_PARAMETERS}
        if self.output_gate:
            ours["gate_proj"] = "colwise"
        if self.hidden_act == "poly_norm":  # whose means are over all channels, of which a rank would have a part
            llama = {name: style for name, style in llama.items() if ".mlp." not in name}
        of_layers = {f"layers.*.self_attn.{name}": style for name, style in ours.items()}
        return llama | of_layers | self.__dict__.get("base_model_tp_plan", {})

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        # transformers 5.17 adds the embeddings where they are tied. `to_dict` leaves it out, as a plan of its own.
        known = self.base_model_tp_plan
        self.__dict__["base_model_tp_plan"] = {name: style for name, style in plan.items() if name not in known}

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "DiffTransformerConfig":
        """Return a live view of this configuration with the heads of the one attention call, for caches and servers."""
        return cache_view(self)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save, with the code files that ``auto_map`` names."""
        if getattr(self, "auto_map", None) in (auto_map(True), auto_map(False)):
            self.auto_map = auto_map(self.is_causal)  # which from_pretrained(…, is_causal=…) sets afterwards
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for name, text in code_files().items():
                Path(save_directory, name).write_text(text, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a subclass alone: this class, loaded by ``auto_map``, would be saved with copies of this file."""
        if cls.model_type != DiffTransformerConfig.model_type:
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration as transformers does, and set ``layer_types``, which is often no attribute yet."""
        if "layer_types" not in kwargs:
            return super().from_dict(config_dict, **kwargs)
        types = kwargs.pop("layer_types")
        found = super().from_dict(config_dict, **kwargs)
        (found[0] if isinstance(found, tuple) else found).layer_types = types
        return found

    def validate_rope(self) -> None:
        """Check the rotary embedding's settings as transformers does, by the width of what it turns."""
        of_turned = copy(viewed_config(self))  # a view's head_dim is a property
        of_turned.head_dim = self.qk_rope_head_dim if self.spec.latent else self.head_dim
        super(DiffTransformerConfig, of_turned).validate_rope()

    def check(self) -> None:
        """Check all that the constructor has checked: `from_pretrained(…, name=value)` sets a value afterwards.

        Raises:
            ValueError: see the class.
        """
        counts = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        for name in (*counts, "head_dim", "max_position_embeddings"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}.")
        for name in ("rms_norm_eps", "attention_norm_eps"):
            eps = getattr(self, name)
            if eps is not None and not 0 <= eps < math.inf:
                raise ValueError(f"{name} must be a finite number, 0 or more, got {eps}.")
        feed_forward_class(self.hidden_act)
        constant_lambda(1, self.lambda_init)
        settings, of_type = self.spec.settings, f"attention_type {self.attention_type!r}"
        taken = {name: name in settings for name in ("headwise_norm", "dual_lambda")}
        for name, is_taken in (*taken.items(), ("token_lambda", self.has_token_lambda)):
            if getattr(self, name) and not is_taken:
                raise ValueError(f"{name} must be false or left out for {of_type}, got True.")
        for name, option in ATTENTION_OPTIONS.items():
            if getattr(self, name) and option not in settings:
                raise ValueError(f"{name} must be left out for {of_type}, got {getattr(self, name)!r}.")
        for one, other in (("qk_norm", "qk_clip"), ("dual_lambda", "token_lambda")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other, got both.")
        numbers = range(self.num_hidden_layers)
        if any(type(each) is not int or each not in numbers for each in self.layers_without_rotary or ()):
            raise ValueError(
                f"layers_without_rotary must be numbers of layers in 0 … {self.num_hidden_layers - 1}, got "
                f"{self.layers_without_rotary}."
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be at least 0 and below 1, got {self.attention_dropout!r}.")
        if self.dex_lambda_start is not None and not math.isfinite(self.dex_lambda_start):
            raise ValueError(f"dex_lambda_start must be a finite number, got {self.dex_lambda_start!r}.")
        if self.spec.latent and self.num_noise_heads is None:
            self.num_noise_heads = self.num_attention_heads // 2
        if self.spec.grouped and self.num_noise_heads is None:
            raise ValueError(
                f"{of_type} needs num_noise_heads, the number of groups of num_attention_heads query heads, got None."
            )
        if self.spec.latent:
            given = {name: getattr(self, name) for name in LATENT_SIZES}
            latents, self.head_dim = latent_sizes(self.hidden_size, self.num_attention_heads, self.head_dim, given)
            self.__dict__.update(latents)
        sizes = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        pairs, groups = self.spec.pairs_heads or self.spec.even_heads, self.spec.noise_heads(self)
        self.num_key_value_heads = checked_key_heads("DiffTransformerConfig", *sizes, pairs, groups)
        if (heads_of_layers := self.dex_heads) is not None:
            layers = self.num_hidden_layers
            if len(heads_of_layers) != layers or not all(isinstance(heads, list | tuple) for heads in heads_of_layers):
                raise ValueError(
                    f"dex_heads must be one list of heads for each of the {layers} layers, got {heads_of_layers}."
                )
            for layer, heads in enumerate(heads_of_layers):
                check_chosen_heads(f"dex_heads of layer {layer}, counted from 0", heads, self.num_attention_heads)
            if not any(heads_of_layers):
                raise ValueError("dex_heads must name one head or more, got empty lists only.")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id must lie in 0 … vocab_size − 1, got {self.pad_token_id} of {self.vocab_size}."
            )
        rope = {"rope_type": "default", "rope_theta": 1} | (self.rope_parameters or {})
        rope_type, theta = rope["rope_type"], rope["rope_theta"]
        if type(theta) not in (int, float) or not 0 < theta < math.inf:
            raise ValueError(f"rope_theta must be a finite number above 0, got {theta!r}.")
        if rope_type not in (allowed := sorted({"default", *ROPE_INIT_FUNCTIONS})):
            raise ValueError(f"rope_type must be one of {', '.join(map(repr, allowed))}, got {rope_type!r}.")
        if head_dim(self) % 2 and not self.spec.latent:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {head_dim(self)}.")
        window, types = self.sliding_window, getattr(self, "layer_types", None)
        if window is not None and window < 2:  # transformers' caches keep window − 1 tokens
            raise ValueError(f"sliding_window must be 2 or more, or None for no window, got {window}.")
        if types is not None:
            if len(types) != self.num_hidden_layers or not set(types) <= {"full_attention", "sliding_attention"}:
                raise ValueError(
                    "layer_types must name 'full_attention' or 'sliding_attention' for each of "
                    f"{self.num_hidden_layers} layers, got {quoted(types)}."
                )
            if "sliding_attention" in types and window is None:
                raise ValueError("layer_types with 'sliding_attention' need a sliding_window, got None.")
        if not self.is_causal and "sliding_attention" in self.types_of_layers():
            got = f"got {window}" if types is None else f"and layer_types None, got {quoted(types)}"
            raise ValueError(
                "an encoder (is_causal False) has no sliding window, since a window looks back only: sliding_window "
                f"must be None, {got}."
            )


# A saved model has two code files, and `auto_map` in its config.json names them: without an import of this package
# transformers does not know the model, and says that `trust_remote_code=True` loads it. They hold no model but import
# this package, so no folder carries code that grows old.
_CONFIGURATION, _MODELING = "configuration_diff_transformer", "modeling_diff_transformer"

# transformers' Auto classes and this package's. `auto_map` of config.json has the causal one or the masked one.
AUTO_CLASSES = {
    "AutoConfig": "DiffTransformerConfig",
    "AutoModel": "DiffTransformerModel",
    "AutoModelForCausalLM": "DiffTransformerForCausalLM",
    "AutoModelForMaskedLM": "DiffTransformerForMaskedLM",
    "AutoModelForQuestionAnswering": "DiffTransformerForQuestionAnswering",
    "AutoModelForSequenceClassification": "DiffTransformerForSequenceClassification",
    "AutoModelForTokenClassification": "DiffTransformerForTokenClassification",
}

# transformers looks for imports in these files, and answers a missing package before it runs them, but not for imports
# in a `try`: so the user reads the sentence of these two.
_CONFIGURATION_TEXT = '''"""The configuration of this checkpoint. Its code is in the Python package diff-transformer.

After `import diff_transformer` transformers knows the model, and this file is not needed.
"""

import importlib

from packaging.version import Version

NEEDED = "{version}"
INSTALL = "{install}"

try:
    import diff_transformer
except ModuleNotFoundError as error:
    if error.name != "diff_transformer":
        raise
    raise ImportError(f"This model needs the package diff-transformer, which is not installed: {{INSTALL}}") from None
if Version(diff_transformer.__version__) < Version(NEEDED):
    raise ImportError(
        f"This model needs diff-transformer {{NEEDED}} or later, "
        f"but {{diff_transformer.__version__}} is installed: {{INSTALL}}"
    )

package = importlib.import_module("diff_transformer.model")
DiffTransformerConfig = package.DiffTransformerConfig
'''

_MODELING_TEXT = '''"""The models of this checkpoint. Their code is in the Python package diff-transformer."""

from .{configuration} import package

{classes}
'''


def auto_map(is_causal: bool = True) -> dict[str, str]:
    """Return ``auto_map`` of a configuration: Auto class → "file.class"."""
    other = "AutoModelForMaskedLM" if is_causal else "AutoModelForCausalLM"
    return {
        auto: f"{_CONFIGURATION if auto == 'AutoConfig' else _MODELING}.{name}"
        for auto, name in AUTO_CLASSES.items()
        if auto != other
    }


def code_files() -> dict[str, str]:
    """Return the code files by name. They ask for this version of the package or a later one."""
    models = [name for auto, name in AUTO_CLASSES.items() if auto != "AutoConfig"]
    classes = "\n".join(f"{name} = package.{name}" for name in models)
    return {
        f"{_CONFIGURATION}.py": _CONFIGURATION_TEXT.format(version=__version__, install=INSTALL),
        f"{_MODELING}.py": _MODELING_TEXT.format(configuration=_CONFIGURATION, classes=classes),
    }
