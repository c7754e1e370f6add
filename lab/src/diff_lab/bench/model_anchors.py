"""Decodes a Llama as a user could without this package: in plain torch, and by CTranslate2."""

import copy
import functools
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor


def decode_plainly(llama: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Return a run that decodes the last of tokens (B, N) to logits (B, 1, V), behind a cache of those before.

    The layers are the Llama's. SDPA reads keys and values of N tokens that are made once and written in place.
    """
    model, last, heads = llama.model, tokens.shape[1] - 1, (-1, llama.config.head_dim)
    cos, sin = model.rotary_emb(model.embed_tokens.weight, torch.arange(last + 1, device=tokens.device)[None])
    sizes = len(model.layers), 2, len(tokens), llama.config.num_key_value_heads, last + 1, llama.config.head_dim
    cache = model.embed_tokens.weight.new_zeros(sizes)

    def norm(module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)

    @torch.no_grad()
    def decode(first: int = last, end: int = last + 1) -> Tensor:
        x = model.embed_tokens(tokens[:, first:end])
        for layer, memory in zip(model.layers, cache, strict=True):
            attention, normed = layer.self_attn, norm(layer.input_layernorm, x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (linear(normed).unflatten(-1, heads).transpose(1, 2) for linear in projections)
            pair = torch.stack((q, k))
            left, right = pair.chunk(2, dim=-1)
            q, k = pair * cos[:, first:end] + torch.cat((-right, left), dim=-1) * sin[:, first:end]
            keys, values = memory[:, :, :, :end]
            keys[:, :, first:], values[:, :, first:] = k, v
            seen = F.scaled_dot_product_attention(q, keys, values, is_causal=first == 0)
            x = x + attention.o_proj(seen.transpose(1, 2).flatten(2))
            x = x + layer.mlp(norm(layer.post_attention_layernorm, x))
        return llama.lm_head(norm(model.norm, x[:, -1:]))

    decode(0, last)
    return decode


class CTranslate2Decoding:
    """Run of CTranslate2 that decodes the last of tokens (B, N) to logits (B, 1, V), behind a cache of those before.

    It converts a float32 Llama itself. Raises ModuleNotFoundError if it is not installed, ValueError for a dtype in
    which it is not fast here.
    """

    def __init__(self, llama: Any, tokens: Tensor, dtype: str) -> None:
        if find_spec("ctranslate2") is None:
            raise ModuleNotFoundError("it is not installed: pip install ctranslate2")
        from ctranslate2 import Generator
        from ctranslate2.converters.transformers import LlamaLoader

        name_of = "<extra_id_{}>".format  # as CTranslate2 calls a token without a name
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), name_of(0))
        with torch.no_grad():  # the loader takes the model apart
            spec = LlamaLoader()(copy.deepcopy(llama).cpu(), SimpleNamespace(get_vocab=dict, **special))
        spec.validate()
        spec.optimize(quantization=dtype)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            threads = torch.get_num_threads()
            generator = Generator(folder, llama.device.type, compute_type=dtype, intra_threads=threads)
        prompts = [list(map(name_of, row)) for row in tokens.tolist()]
        self._generate = functools.partial(generator.generate_batch, prompts, include_prompt_in_result=False)

    def __call__(self) -> Tensor:
        logits = [numpy.asarray(result.logits[0]) for result in self._generate(max_length=1, return_logits_vocab=True)]
        return torch.from_numpy(numpy.stack(logits)).view(len(logits), 1, -1)

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a token: of so many behind the first one, before which the cache is filled."""
        times: list[float] = []
        lengths = dict.fromkeys(("min_length", "max_length"), tokens + 1)
        self._generate(**lengths, callback=lambda step: times.append(time.perf_counter()))
        return (times[-1] - times[0]) / tokens
