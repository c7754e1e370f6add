"""The pipeline plan: what it names exists, stages cut by it compose to the model, and transformers can run it.

transformers' own pipeline is run by two ranks, each with its layers; they run this file as a script.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from transformers import distributed as transformers_distributed

import ranks
from diff_transformer import DiffTransformerForCausalLM
from tiny_model import FORMS, name_of_form

TOKENS = torch.arange(1, 19).view(2, 9)
HAS_PIPELINE = "pp_size" in inspect.signature(transformers_distributed.DistributedConfig).parameters


def on_a_rank() -> None:
    """What a rank finds: logits, and greedy tokens."""
    rank, folder = ranks.join()
    plan = transformers_distributed.DistributedConfig(pp_size=ranks.RANKS)
    for kind in map(name_of_form, FORMS):
        model = DiffTransformerForCausalLM.from_pretrained(folder / kind, dtype=torch.float64, distributed_config=plan)
        layers = [name for name, _ in model.named_parameters() if name.endswith("q_proj.weight")]
        assert layers == [f"model.layers.{rank}.self_attn.q_proj.weight"]
        with torch.no_grad():
            answers = {"logits": model(TOKENS).logits, "tokens": generate(model)}
        save_file({name: value.contiguous() for name, value in answers.items()}, folder / f"{kind} {rank}.safetensors")
    torch.distributed.destroy_process_group()


def generate(model: DiffTransformerForCausalLM) -> Tensor:
    mask = torch.ones_like(TOKENS)
    return model.generate(TOKENS, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, make: Any) -> Path:
    """The folder in which both ranks have written what they found."""
    return ranks.spread_models(__file__, tmp_path_factory.mktemp("ranks"), make)


@pytest.mark.skipif(not HAS_PIPELINE, reason="this release of transformers declares pipelines and does not run them")
def test_two_ranks_give_what_one_process_gives(kind: str, spread: Path, make: Any, check: Any) -> None:
    model = make(kind)
    for rank in range(ranks.RANKS):
        answers = load_file(spread / f"{name_of_form(kind)} {rank}.safetensors")
        check(answers["logits"], model(TOKENS).logits)
        assert torch.equal(answers["tokens"], generate(model))


def test_the_plan_is_llamas(kind: str, make: Any) -> None:
    """Whatever splits a Llama by its plan finds the same names and the same inputs and outputs here."""
    model = make(kind)
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    )
    assert type(model)._pp_plan == LlamaForCausalLM._pp_plan
    assert model.pp_plan == llama.pp_plan
    assert AutoModel.from_config(model.config).pp_plan == llama.model.pp_plan
    assert model.config.base_model_pp_plan == LlamaConfig.base_model_pp_plan
    for name in model.pp_plan:
        assert isinstance(model.get_submodule(name), nn.Module)
    assert "base_model_pp_plan" not in model.config.to_dict()


if __name__ == "__main__":
    on_a_rank()
