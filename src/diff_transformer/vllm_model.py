"""The language model in vLLM: vLLM's wrapper of transformers' models, which finds the layers' one attention call.

vLLM would take the wrapper of models with pictures, as the configuration for caches and servers is another object than
the configuration; a registered class is taken as it is.
"""

from typing import Any

from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


class VllmDiffTransformer(TransformersForCausalLM):
    """A model of this package with vLLM's layers, kernels and paged cache.

    Raises:
        ValueError: vLLM's kernels for the CPU lack the width of the model's cached heads.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        width = config.get_text_config().head_dim
        if current_platform.is_cpu() and width not in (widths := CPUAttentionBackend.get_supported_head_sizes()):
            raise ValueError(
                f"vLLM's attention on the CPU has heads of width {', '.join(map(str, widths))}, and a model of "
                f"attention_type {config.attention_type!r} with head_dim {config.head_dim} caches heads of width "
                f"{width}."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
