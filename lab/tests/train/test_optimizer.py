"""Learning rate and weight decay."""

import pytest
import torch

from diff_lab.train.recipe import TrainRecipe
from diff_lab.train.step import build_optimizers, learning_rate
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import KINDS


def recipe(**settings: object) -> TrainRecipe:
    return TrainRecipe.model_validate({"steps": 100, "learning_rate": 1.0, "warmup_steps": 10} | settings)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_and_the_ends(schedule: str) -> None:
    settings = recipe(schedule=schedule)
    assert [learning_rate(step, settings) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(100, settings) == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert learning_rate(55, settings) == pytest.approx(1.0 if schedule == "constant" else 0.55)
    later = [learning_rate(step, settings) for step in range(10, 101)]
    assert later == sorted(later, reverse=True)


def test_without_warm_up_or_with_nothing_else() -> None:
    assert learning_rate(1, recipe(warmup_steps=0, steps=1, final_learning_rate=0.5)) == pytest.approx(0.5)
    assert learning_rate(100, recipe(warmup_steps=100)) == pytest.approx(1.0)
    assert learning_rate(50, recipe(warmup_steps=200)) == pytest.approx(0.25)


def test_the_last_steps_decay_after_a_stable_time() -> None:
    settings = recipe(schedule="warmup_stable_decay", decay_steps=20, final_learning_rate=0.5)
    rates = {step: learning_rate(step, settings) for step in (5, 10, 50, 80, 90, 100)}
    assert rates == pytest.approx({5: 0.5, 10: 1, 50: 1, 80: 1, 90: 0.75, 100: 0.5})
    # A decay that is longer than the rest begins right after the warm-up.
    assert learning_rate(55, recipe(schedule="warmup_stable_decay", decay_steps=1000)) == pytest.approx(0.55)
    with pytest.raises(ValueError, match="decay_steps"):
        recipe(schedule="warmup_stable_decay")
    with pytest.raises(ValueError, match="decay_steps"):
        recipe(decay_steps=3)


def tiny(attention_type: str, **settings: object) -> DiffTransformerForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["num_noise_heads"] = 1
    config = DiffTransformerConfig(attention_type=attention_type, vocab_size=7, **sizes, **settings)  # type: ignore[arg-type]
    return DiffTransformerForCausalLM(config)


def names_of(model: DiffTransformerForCausalLM, parameters: list[torch.Tensor]) -> set[str]:
    names = {id(parameter): name.split(".")[-2] for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("attention_type", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_but_not_embeddings_and_lambda(attention_type: str, tied: bool) -> None:
    model = tiny(attention_type, tie_word_embeddings=tied)
    (optimizer,) = build_optimizers(model, recipe(weight_decay=0.2, betas=[0.8, 0.9]))
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0)
    latent = {"q_a_proj", "kv_a_proj"} if attention_type == "gdla" else set()
    assert names_of(model, decayed["params"]) == MATRICES | latent | (set() if tied else {"lm_head"})
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert decayed["betas"] == (0.8, 0.9)


def test_muon_takes_the_matrices_inside_the_layers() -> None:
    model = tiny("diff_v2")
    adamw, muon = build_optimizers(model, recipe(optimizer="muon", weight_decay=0.2, momentum=0.9))
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    (group,) = muon.param_groups
    assert names_of(model, group["params"]) == MATRICES
    assert (group["weight_decay"], group["momentum"]) == (0.2, 0.9)
    decayed, others = adamw.param_groups
    assert names_of(model, decayed["params"]) == {"lm_head"}
    assert "lambda_proj" in names_of(model, others["params"])


def test_a_step_of_muon_is_as_large_as_one_of_adamw() -> None:
    sizes = {}
    for name in ("adamw", "muon"):
        torch.manual_seed(0)
        model = tiny("diff")
        before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in build_optimizers(model, recipe(optimizer=name, learning_rate=0.01, weight_decay=0.0)):
            optimizer.step()
        step = model.model.layers[0].mlp.up_proj.weight.detach() - before
        sizes[name] = float(step.square().mean().sqrt())
    # AdamW's first step has a root mean square of the learning rate, later ones about a fifth of it: Muon's all have.
    assert sizes["adamw"] == pytest.approx(0.01, rel=0.01)
    assert sizes["muon"] / sizes["adamw"] == pytest.approx(0.2, rel=0.25)
