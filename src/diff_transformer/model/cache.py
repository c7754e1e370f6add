"""Makes a KV cache that grows in place."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from diff_transformer.ops.attention_request import PLAIN, may_skip_dispatcher
from diff_transformer.ops.cpu.cpu_backend import token_step
from diff_transformer.ops.packed import pack, unpack

# transformers' name of a model's cache, given and returned: "cache" as of 5.24.
CACHE_NAME = next(name for name in ("cache", "past_key_values") if name in BaseModelOutputWithPast.__dataclass_fields__)


def given_cache(past_key_values: Cache | None, arguments: dict[str, Any]) -> Cache | None:
    """Return the cache by whichever name it has, taken out of the arguments. Raises ValueError for two caches."""
    # Before 5.24 a paged one has that name, too, and is for the attention implementation.
    cache = arguments.pop("cache" if isinstance(arguments.get("cache"), Cache) else CACHE_NAME, None)
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values name one cache, got both (as PEFT's prefix tuning gives them).")
    return past_key_values if cache is None else cache


class _GrowsInPlace:
    """Mixin of transformers' layers: keys and values are views of memory with room for more.

    The first tokens are stored without any: many a cache is never added to.
    """

    keys: Tensor
    values: Tensor
    is_initialized: bool
    cumulative_length: int
    _keys_memory: Tensor | None = None
    _values_memory: Tensor | None = None
    expected_length: int | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, N, width); return all that these tokens may see."""
        window = getattr(self, "sliding_window", None)
        keeps_all = window is not None and getattr(self, "record_past", False)  # until drafts are cut off again
        written = None if keeps_all else self._written(key_states, value_states)
        if written is None:
            updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
            return updated
        self.keys, self.values = keys, values = written
        if window is not None:  # of which a later token sees one less, beside itself
            self.cumulative_length += key_states.shape[2]
            self.keys, self.values = keys[:, :, 1 - window :], values[:, :, 1 - window :]
        return keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every row the tokens of the row that ``beam_idx`` (B,) names, in the memory that they have."""
        before = self.keys, self.values
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        after = self.keys, self.values
        if self._may_write(*after) and before[0].shape == after[0].shape:
            self.keys, self.values = (old.copy_(new) for old, new in zip(before, after, strict=True))

    def _written(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Write new tokens behind those seen, and return views of all; None where they cannot stand."""
        of_keys, of_values = (self.keys, self._keys_memory, keys), (self.values, self._values_memory, values)
        grown: Any = token_step("appended", *of_keys, *of_values)
        if grown is None or grown[0] is None:  # memory is yet to be made, or a kernel's library to be loaded
            if not self._may_write(keys, values):
                return None
            self._keys_memory, keys = self._append(self._keys_memory, self.keys, keys)
            self._values_memory, values = self._append(self._values_memory, self.values, values)
            grown = keys, values
        return grown

    def _may_write(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether there are tokens, and these may be written behind them."""
        if torch.is_grad_enabled() or not may_skip_dispatcher():
            return False
        if not self.is_initialized or self.keys.dim() != 4:
            return False
        return _continues(self.keys, keys) and _continues(self.values, values)

    def _append(self, memory: Tensor | None, seen: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write new tokens behind those seen; return the memory, perhaps another one, and its view of all."""
        length, total = seen.shape[2], seen.shape[2] + new.shape[2]
        start = None if memory is None else _place(seen, memory)
        if memory is None or start is None or start + total > memory.shape[2]:
            expected, start = self.expected_length or 0, 0
            room = expected if total <= expected < 2 * total else 2 * total
            memory = seen.new_empty(*seen.shape[:2], room, seen.shape[3])
            memory.narrow(2, 0, length).copy_(seen)
        memory.narrow(2, start + length, total - length).copy_(new)
        return memory, memory.narrow(2, start, total)


def _continues(seen: Tensor, new: Tensor) -> bool:
    """Return whether new tokens may stand in one tensor with those seen, in place."""
    if type(seen) not in PLAIN or type(new) not in PLAIN:
        return False
    if seen.dtype != new.dtype or seen.device != new.device or seen.shape[:2] != new.shape[:2]:
        return False
    return seen.shape[3] == new.shape[3] and (not seen.is_inference() or torch.is_inference_mode_enabled())


def _place(view: Tensor, memory: Tensor) -> int | None:
    """Return at which token of the memory a view begins; None if it is another tensor."""
    if view.stride() != memory.stride() or view.shape[:2] != memory.shape[:2]:
        return None
    token = (view.data_ptr() - memory.data_ptr()) // (memory.stride(2) * memory.itemsize)
    return token if 0 <= token < memory.shape[2] else None


class GrowingLayer(_GrowsInPlace, DynamicLayer):
    """One layer's keys and values, of all tokens."""


class GrowingWindowLayer(_GrowsInPlace, DynamicSlidingWindowLayer):
    """One layer's keys and values, of the last ``sliding_window`` tokens."""


class _InEightBits(_GrowsInPlace):
    """Mixin of a growing layer: keys and values are rounded once, as they come, to the rows of :func:`pack`."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, packed: bool = False, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, N, width); return all that these tokens may see, in their dtype.

        A caller that reads rows gets them with ``packed``, if no gradient is recorded. One passes the tokens of this
        call as if they had not been rounded.
        """
        keys, values = super().update(pack(key_states), pack(value_states))
        if packed and not torch.is_grad_enabled():
            return keys, values
        return _unpacked(keys, key_states), _unpacked(values, value_states)


def _unpacked(rows: Tensor, new: Tensor) -> Tensor:
    seen, start = unpack(rows, new.dtype), rows.shape[2] - new.shape[2]
    if not new.requires_grad:
        return seen
    return torch.cat((seen[:, :, :start], seen[:, :, start:] + (new - new.detach())), 2)


class EightBitLayer(_InEightBits, GrowingLayer):
    """One layer's keys and values in eight bits, of all tokens."""


class EightBitWindowLayer(_InEightBits, GrowingWindowLayer):
    """One layer's keys and values in eight bits, of the last ``sliding_window`` tokens."""


class DiffCache(DynamicCache):
    """A DynamicCache of transformers whose memory grows by doubling, so that a token is written and nothing copied.

    ``generate`` makes one for our models unless it is given a cache or asked for another implementation. It has room
    for at most twice the tokens in it, and while a layer's keys or values move to larger memory, for those once more.
    With a sliding window that is at most twice the window. A tensor that it returns, or that its layers hold, is a view
    of memory that is written again after ``crop`` and ``reorder_cache``: to keep one, clone it.

    Args:
        config: the model's configuration, whose windows the layers have; None for layers without any.
        expected_length: how many tokens there are going to be. Memory for more than these is made once they come.
        bits: 8 to round keys and values to int8, with one float32 scale for each token and head, in half the memory of
            bfloat16; None to keep them as they are.

    Raises:
        ValueError: other ``bits``.

    Examples:
        >>> cache, tokens = DiffCache(), torch.zeros(1, 4, 10, 16)
        >>> with torch.no_grad():
        ...     for _ in range(2):
        ...         keys, values = cache.update(tokens, tokens, layer_idx=0)
        >>> keys.shape, cache.layers[0].keys.stride()  # room for 40 tokens
        (torch.Size([1, 4, 20, 16]), (2560, 640, 16, 1))
    """

    layer_class_to_replicate: Any

    def __init__(
        self, config: PreTrainedConfig | None = None, expected_length: int | None = None, bits: int | None = None
    ) -> None:
        if bits not in (None, 8):
            raise ValueError(f"bits must be 8 or None, got {bits!r}.")
        super().__init__(config=config)
        whole, windowed = (GrowingLayer, GrowingWindowLayer) if bits is None else (EightBitLayer, EightBitWindowLayer)

        def grow(layer: Any = None) -> _GrowsInPlace:
            window = getattr(layer, "sliding_window", None)
            growing = whole() if window is None else windowed(window)
            growing.expected_length = expected_length
            return growing

        self.layers: list[Any] = [grow(layer) for layer in self.layers]
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = grow
