"""Asks which instructions torch multiplies bfloat16 with on this processor, in this process."""

import os

import torch


@torch.compiler.assume_constant_result
def multiplies_with_amx() -> bool:
    """Whether torch's attention and layers multiply bfloat16 with AMX."""
    return _uses("_is_amx_tile_supported", "AMX")


def multiplies_bfloat16() -> bool:
    """Whether they have any instructions for it: AMX or AVX512-BF16. Without, bfloat16 is slower than float32."""
    return multiplies_with_amx() or _uses("_is_avx512_bf16_supported", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AMX")


def _uses(question: str, *levels: str) -> bool:
    """Whether the processor has what ``torch.cpu`` is asked for, and torch may use it.

    That takes AVX-512 as torch's own level, which ATEN_CPU_CAPABILITY lowers, and oneDNN, which can be switched off or
    held to the instructions of a lower level; ``levels`` are the words of those that are high enough.
    """
    is_supported = getattr(torch.cpu, question, None)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    return bool(
        is_supported is not None
        and is_supported()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and (limit in ("ALL", "DEFAULT") or any(level in limit for level in levels))
    )
