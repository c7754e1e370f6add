"""Makes vLLM know the language model, through its entry point ``vllm.general_plugins``. Nothing else imports this."""

from diff_transformer.model import DiffTransformerForCausalLM


def register() -> None:
    """Register the model, whose configuration transformers knows by now. vLLM calls this in each of its processes."""
    from vllm import ModelRegistry

    # By its place, so that vLLM's own models are not imported before a process needs them.
    ModelRegistry.register_model(DiffTransformerForCausalLM.__name__, "diff_transformer.vllm_model:VllmDiffTransformer")
