"""A folded DEX is a Llama to llama.cpp: as GGUF, the file of llama.cpp and Ollama, it computes what the DEX computed.

llama.cpp's converter is no package. What it does with a Llama is done here, with the names and the format of the
package ``gguf``, and transformers reads the file as llama.cpp would.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert import convert_to
from diff_transformer.nn import DexCorrection
from tiny_model import SIZES

gguf = pytest.importorskip("gguf")


def write_gguf(llama: Any, file: Path) -> None:
    """The GGUF file of a Llama, in float32. Rotary channels lie interleaved there, as in the first Llama."""
    config = llama.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in llama.state_dict().items():
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, f"llama.cpp knows no {name}"
        for projection, heads in {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.items():
            if projection in name:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(known, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def test_a_folded_dex_is_a_llama_in_gguf(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 32}  # A · d, as the reader of GGUF takes a Llama to be
    torch.manual_seed(5)
    tokens = torch.randint(sizes["vocab_size"], (2, 9))
    config = DiffTransformerConfig(attention_type="dex", dex_heads=[[0, 3], [1]], **sizes, initializer_range=0.3)
    dex = DiffTransformerForCausalLM(config).eval()
    plain: Tensor = dex(tokens).logits
    for module in dex.modules():
        if isinstance(module, DexCorrection):
            torch.nn.init.normal_(module.weight, std=0.7)
    corrected = dex(tokens).logits
    assert (corrected - plain).abs().max() > 0.05 * plain.abs().max()
    dex.save_pretrained(tmp_path / "dex")
    convert_to("llama", tmp_path / "dex", tmp_path / "llama")
    write_gguf(LlamaForCausalLM.from_pretrained(tmp_path / "llama"), tmp_path / "model.gguf")
    read = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    assert (read(tokens).logits - corrected).abs().max() < 1e-5 * corrected.abs().max()
