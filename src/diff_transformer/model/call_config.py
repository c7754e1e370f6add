"""The configuration as caches and servers must read it: the heads of the one attention call, not the twin's.

A cache or server sizes itself from ``config.get_text_config()``, and takes for granted that a layer caches
``num_key_value_heads`` heads of ``head_dim`` and sends ``num_attention_heads`` queries. Our configuration has the twin
Transformer's numbers there; what a layer really sends is

    attention_type   queries     keys and values
    "diff"           A of 2d     A_kv / 2 of 2d
    "diff_v2"        2A of d     A_kv of d
    others           A of d      A_kv of d

Caches that are filled with the twin's sizes, as by PEFT's prefix tuning, are converted by :func:`pair_cached_heads`.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Cache

    from diff_transformer.model.configuration import DiffTransformerConfig


class CallConfig:
    """Mixin of a live view of a configuration, in which only the three head sizes differ.

    A view shares its attributes with the configuration it was made from: what is written to either is read from both.
    It equals that configuration, is saved and printed as that configuration, and is copied and pickled with it.
    The three sizes are computed, so they are set on the configuration itself.
    """

    __slots__ = ("_viewed",)

    _viewed: DiffTransformerConfig

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The class, called, makes an ordinary configuration: callers read defaults from ``type(view)()``."""
        return cls.__bases__[1](*args, **kwargs)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the one call."""
        return self._viewed.num_attention_heads * (2 if self._viewed.attention_type == "diff_v2" else 1)

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys, and of values, that a layer caches."""
        heads: int = self._viewed.num_key_value_heads  # type: ignore[assignment]  # never None once it is constructed
        return heads // 2 if self._viewed.attention_type == "diff" else heads

    @property
    def head_dim(self) -> int:
        """Width of each of them."""
        width: int = self._viewed.head_dim  # type: ignore[assignment]  # never None once it is constructed
        return width * 2 if self._viewed.attention_type == "diff" else width

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> CallConfig:
        """The view itself: a view of a view would count twice."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return self._viewed.to_dict()

    def to_diff_dict(self) -> dict[str, Any]:
        return self._viewed.to_diff_dict()

    def __eq__(self, other: object) -> bool:
        return self._viewed == twin_config(other)

    __hash__ = None  # type: ignore[assignment]  # as every configuration of transformers, which can be written to

    def __copy__(self) -> DiffTransformerConfig:
        return call_config(copy(self._viewed))

    def __reduce__(self) -> tuple[Any, ...]:
        return call_config, (self._viewed,)


# No functools.cache: torch.compile, which meets this where a model makes its own cache, warns of one.
_CLASSES: dict[type[DiffTransformerConfig], type[DiffTransformerConfig]] = {}


def call_config_class(viewed: type[DiffTransformerConfig]) -> type[DiffTransformerConfig]:
    """The class of the views of one configuration class: a subclass of it, so that isinstance holds."""
    if viewed not in _CLASSES:
        # transformers makes a dataclass of every configuration class, which would get a comparison of its own.
        members = {"__module__": __name__, "__slots__": (), "__eq__": CallConfig.__eq__, "__hash__": None}
        _CLASSES[viewed] = type(viewed.__name__, (CallConfig, viewed), members)
    return _CLASSES[viewed]


def call_config(config: DiffTransformerConfig) -> DiffTransformerConfig:
    """The view of a configuration; the configuration itself where the call has the twin's sizes."""
    if config.attention_type not in ("diff", "diff_v2"):
        return config
    view = object.__new__(call_config_class(type(config)))
    # Not __init__, nor a copy: the view has the very dictionary of attributes that the configuration has.
    object.__setattr__(view, "__dict__", config.__dict__)
    object.__setattr__(view, "_viewed", config)
    return view


def twin_config(config: Any) -> Any:
    """The configuration a view was made from; anything else as it is."""
    return config._viewed if isinstance(config, CallConfig) else config


def pair_cached_heads(cache: Cache | None, config: DiffTransformerConfig) -> None:
    """Put the heads of a cache that was filled by the twin's sizes in pairs, as the layers of "diff" hold them.

    Keys and values (B, A_kv, S, d) become (B, A_kv / 2, S, 2d), two heads side by side, which is how the twin's
    projections make both. Any other cache is left alone.

    Args:
        cache: what is cached, or None; changed in place.
        config: the model's.
    """
    if config.attention_type != "diff":
        return
    for layer in getattr(cache, "layers", ()):
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.shape[-1] == config.head_dim:
            for name in ("keys", "values"):
                heads = getattr(layer, name).unflatten(1, (-1, 2))  # (B, A_kv / 2, 2, S, d)
                setattr(layer, name, heads.transpose(2, 3).flatten(3))
