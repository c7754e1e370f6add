"""Lets transformers batch continuously (``generate_batch``) a model that runs our own operator otherwise."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager

from diff_transformer.model.interface_attention import OWN_IMPLEMENTATIONS


class ContinuousBatching(GenerationMixin):
    """Mixin of a causal language model: while transformers batches continuously, one of its implementations runs.

    transformers reads and writes its paged cache in "sdpa", "paged|eager" or FlashAttention, and refuses others. In
    those a layer of ours makes its one ordinary call, so the tokens are those of ``generate``.
    """

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> ContinuousBatchingManager:
        """transformers' manager of requests. Our own operator gives way to "sdpa", or FlashAttention if there is one.

        ``generate_batch`` and ``continuous_batching_context_manager`` go back to it afterwards; whoever calls this
        method does so with ``set_attn_implementation``.

        Raises:
            NotImplementedError: this transformers sizes its paged cache by the heads of the configuration (until 5.16).
        """
        config = self.config.get_text_config()
        if config.num_key_value_heads != self.config.num_key_value_heads and not _reads_the_call_config():
            raise NotImplementedError(
                f"continuous batching of attention_type {self.config.attention_type!r} needs a transformers whose "
                "paged cache takes its sizes from config.get_text_config() (5.17 or later)."
            )
        if self.config._attn_implementation in OWN_IMPLEMENTATIONS:
            self.set_attn_implementation("sdpa")
        return super().init_continuous_batching(*args, **kwargs)

    @contextmanager
    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Iterator[ContinuousBatchingManager]:
        """transformers' own, and the attention implementation is afterwards the one it was before."""
        before = self.config._attn_implementation
        try:
            with super().continuous_batching_context_manager(*args, **kwargs) as manager:
                yield manager
        finally:
            if self.config._attn_implementation != before:
                self.set_attn_implementation(before)


def _reads_the_call_config() -> bool:
    # Nothing that can be called tells: earlier releases have the same classes, with the sizes of the other config.
    return "get_text_config" in inspect.getsource(ContinuousBatchingManager)
