"""Describes an exported ONNX graph to ONNX Runtime GenAI, which then generates with it."""

from typing import Any

GENAI_CONFIG = "genai_config.json"


def genai_config(model: Any, graph: str) -> dict[str, Any] | None:
    """The content of `GENAI_CONFIG`, for a graph as ``export_graph`` writes it.

    Args:
        model: the language model that the graph was made of.
        graph: the name of the graph's file, in the same folder.

    Returns:
        None where the model has no token that ends a text: GenAI would take another token for it.
    """
    config = model.config.get_text_config()  # the heads that are cached
    ends = model.generation_config.eos_token_id
    ends = config.eos_token_id if ends is None else ends
    if ends is None:
        return None
    end = ends[0] if isinstance(ends, list) else ends
    return {
        "model": {
            "type": "decoder",
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "bos_token_id": end if config.bos_token_id is None else config.bos_token_id,
            "eos_token_id": ends,
            "pad_token_id": end if config.pad_token_id is None else config.pad_token_id,
            "decoder": {
                "filename": graph,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "hidden_size": config.hidden_size,
                "head_size": config.head_dim,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                "num_hidden_layers": config.num_hidden_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        # The graph hands out new keys and values instead of writing into those it was given.
        "search": {
            "do_sample": False,
            "max_length": config.max_position_embeddings,
            "past_present_share_buffer": False,
        },
    }
