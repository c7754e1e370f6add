"""Runs of every kind of model: maps and predictions with the learned λ and with another."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, GPT2LMHeadModel, Lfm2Config, MambaConfig

from diff_transformer import DiffTransformerForCausalLM, attention_maps
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.explorer import ExploredModel, LambdaSettings
from diff_transformer.explorer.trace import Trace
from explored_models import make
from tiny_model import DIFFERENTIAL, KINDS, PAIRED, SIZES

TOKENS = [3, 7, 1, 12, 7, 9, 3, 7, 20, 11, 3, 5]
EVERYTHING = slice(None)


def check_maps(trace: Trace, model: DiffTransformerForCausalLM, tokens: list[int] = TOKENS) -> None:
    """Every head's maps are those of `attention_maps`, whole and from a row on."""
    for layer, expected in enumerate(attention_maps(model, torch.tensor([tokens]))):
        maps = trace.maps.of(layer, EVERYTHING)
        torch.testing.assert_close(maps.difference, expected.difference[0], rtol=0, atol=1e-6)
        some = trace.maps.of(layer, slice(1, 3), 4)
        torch.testing.assert_close(some.difference, expected.difference[0, 1:3, 4:], rtol=0, atol=1e-6)
        if expected.first is None or expected.second is None:
            assert maps.second is None
            continue
        first = maps.first / maps.first.sum(-1, keepdim=True)  # without its weight
        torch.testing.assert_close(first, expected.first[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(maps.second, expected.second[0], rtol=0, atol=1e-6)


def check_predictions(trace: Trace, model: Any, tokens: list[int] = TOKENS, atol: float = 1e-9) -> None:
    logits = model(torch.tensor([tokens])).logits[0].detach()
    torch.testing.assert_close(trace.next_log_probabilities, logits[-1].log_softmax(-1), rtol=0, atol=atol)
    expected = F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    torch.testing.assert_close(trace.token_losses, expected, rtol=0, atol=atol)
    assert trace.loss == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "dex"])
@pytest.mark.parametrize("config", [{}, {"sliding_window": 4}], ids=["causal", "window"])
def test_the_learned_lambda(kind: str, config: dict[str, Any]) -> None:
    model = make(kind, **config)
    explored = ExploredModel(model, kind)
    trace = explored.trace(TOKENS)
    check_maps(trace, model)
    check_predictions(trace, model)
    in_groups = ", 3 signal heads to a noise head" * ATTENTION_TYPES[kind].grouped
    assert explored.label == ATTENTION_TYPES[kind].label + in_groups
    assert explored.subtracts == (kind in DIFFERENTIAL) == (trace.lambdas is not None)
    if kind in PAIRED:
        learned = model.lambdas()
        assert trace.lambdas is not None
        assert learned is not None
        torch.testing.assert_close(trace.lambdas, torch.tensor(learned).double().unsqueeze(1).expand(2, explored.heads))


def test_signal_heads_share_the_map_of_their_noise_head() -> None:
    """Of six heads, 1 to 3 belong to noise head 1 and 4 to 6 to noise head 2, also where one is asked for alone."""
    explored = ExploredModel(make("diff_grouped"), "grouped")
    assert (explored.heads, explored.noise_heads) == (6, 2)
    assert ExploredModel(make("diff"), "diff").noise_heads is None
    maps = explored.trace(TOKENS).maps
    first, second, _ = maps.of(1, EVERYTHING)
    assert second is not None
    for head in range(6):
        assert torch.equal(second[head], second[head // 3 * 3])
        alone = maps.of(1, slice(head, head + 1))
        assert alone.second is not None
        torch.testing.assert_close(alone.second[0], second[head])
        torch.testing.assert_close(alone.first[0], first[head])
    assert not torch.allclose(second[0], second[3])
    assert not torch.allclose(first[0], first[1])


@pytest.mark.parametrize(
    "settings", [LambdaSettings(factor=0.3), LambdaSettings(layers={2: -0.5})], ids=["factor", "layer"]
)
def test_another_lambda_of_layers_is_what_the_parameters_would_give(settings: LambdaSettings) -> None:
    """λ = exp(0) − exp(0) + λ_init with vectors of zeros, whatever the factor of the norm was made with."""
    trace = ExploredModel(make("diff"), "diff").trace(TOKENS, settings)
    model = make("diff")
    for number, layer in enumerate(model.model.layers, start=1):
        value = settings.of_layer(number, 1)[0]
        if value is None:
            value = settings.factor * layer.self_attn.lam().item()
        if value != layer.self_attn.lam().item():
            for vector in layer.self_attn.lam.parameters():
                torch.nn.init.zeros_(vector)
            layer.self_attn.lam.lambda_init = value
    check_maps(trace, model)
    check_predictions(trace, model)


@pytest.mark.parametrize("kind", DIFFERENTIAL)
@pytest.mark.parametrize("implementation", ["diff_attention_reference", "eager", "sdpa"])
def test_another_lambda_of_one_head(kind: str, implementation: str) -> None:
    """Whatever attention implementation the model is set to."""
    model, expected = make(kind), make(kind)
    model.set_attn_implementation(implementation)
    settings = LambdaSettings(factor=0.5, layers={1: 0.2}, heads={(2, 3): 0.0})
    trace = ExploredModel(model, kind).trace(TOKENS, settings)
    heads = model.config.spec.heads(model.config)
    assert trace.lambdas is not None
    assert trace.lambdas[0].tolist() == pytest.approx([0.2] * heads)
    assert trace.lambdas[1, 2] == 0
    first, second = (layer.self_attn for layer in expected.model.layers)
    learned = second.lambdas
    first.lambdas = lambda x: x.new_full((1, heads, x.shape[1]), 0.2)
    second.lambdas = lambda x: 0.5 * learned(x) * (torch.arange(heads) != 2).double().view(1, -1, 1)
    check_maps(trace, expected)
    # transformers' eager attention rounds its weights to float32.
    check_predictions(trace, expected, atol=1e-4 if implementation == "eager" else 1e-9)


def test_the_learned_lambda_is_back_afterwards() -> None:
    """After an error, too."""
    model = make("diff")
    explored = ExploredModel(model, "diff")
    before = explored.trace(TOKENS)
    explored.trace(TOKENS, LambdaSettings(factor=0.1))
    model.model.norm.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        explored.trace(TOKENS, LambdaSettings(factor=0.1))
    del model.model.norm.forward
    assert all("lambdas" not in vars(layer.self_attn) for layer in model.model.layers)
    assert torch.equal(before.token_losses, explored.trace(TOKENS).token_losses)


def test_the_head_whose_lambda_matters_most_is_known() -> None:
    """Of a model that attends with one head alone, head 3 of layer 2."""
    model = make("diff")
    with torch.no_grad():
        for layer, head in ((0, slice(0, 0)), (1, slice(16, 24))):
            weight = model.model.layers[layer].self_attn.o_proj.weight
            kept = weight[:, head].clone()
            weight.zero_()[:, head] = kept
    assert ExploredModel(model, "diff").most_changed_head(TOKENS) == (2, 3)


def test_the_text_ends_where_lambda_matters_most() -> None:
    model = make("diff", initializer_range=0.5)
    explored = ExploredModel(model, "diff")
    losses = (explored.trace(TOKENS, lambdas).token_losses for lambdas in (LambdaSettings(), LambdaSettings(factor=0)))
    learned, off = ((-one).exp().tolist() for one in losses)
    taken = {place + 1: learned[place] - off[place] for place in range(4, len(TOKENS) - 1)}
    assert max(taken.values()) > 0.01
    assert explored.most_changed_length(TOKENS) == max(taken, key=lambda length: taken[length])
    assert explored.most_changed_length(TOKENS[:2]) == 2


def test_diffllama_stands_on_the_left(diffllama: Any) -> None:
    explored = ExploredModel(diffllama, "diffllama")
    assert (explored.label, explored.subtracts, explored.heads) == ("DIFF", True, 4)
    trace = explored.trace(TOKENS)
    check_predictions(trace, diffllama, atol=1e-4)  # its λ is in float32
    diffllama.set_attn_implementation("eager")
    both = diffllama(torch.tensor([TOKENS]), output_attentions=True).attentions
    for layer, maps in enumerate(both):
        first, second = maps[0].detach().chunk(2)
        shown = trace.maps.of(layer, EVERYTHING)
        torch.testing.assert_close(shown.first, first, rtol=0, atol=1e-5)
        assert shown.second is not None
        torch.testing.assert_close(shown.second, second, rtol=0, atol=1e-5)
    assert explored.trace(TOKENS, LambdaSettings(factor=0.0)).loss != pytest.approx(trace.loss)


@pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")  # PEFT asks for it
def test_of_a_wrapped_model_the_one_inside_is_shown(diffllama: Any) -> None:
    """With its adapters, of PEFT's wrapper, of torch.compile's and of both; learned prompts are no part of it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    plain, adapted = make("diff"), peft.get_peft_model(make("diff"), lora).double()
    both, compiled = (torch.compile(model, backend="eager") for model in (adapted, plain))
    for model, inside in ((adapted, adapted), (both, adapted), (compiled, plain)):
        explored = ExploredModel(model, "wrapped")
        assert explored.label == "DIFF"
        check_maps(explored.trace(TOKENS), inside)
        check_predictions(explored.trace(TOKENS), inside)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for model, config, kind in ((make("diff"), prompts, "PROMPT_TUNING"), (copy.deepcopy(diffllama), lora, "LORA")):
        with pytest.raises(ValueError, match=f"m is not shown with PEFT's {kind}: merge it or remove it first"):
            ExploredModel(peft.get_peft_model(model, config), "m")


def test_any_model_of_transformers_stands_on_the_right(llama: Any) -> None:
    explored = ExploredModel(llama, "llama")
    assert (explored.label, explored.subtracts, explored.heads, explored.kv_heads) == ("Llama", False, 8, 4)
    trace = explored.trace(TOKENS)
    check_predictions(trace, llama, atol=1e-4)  # eager weights are
    assert llama.config._attn_implementation == "sdpa"
    row = trace.maps.of(0, slice(2, 3), 5).first[0, 0]
    assert row.sum().item() == pytest.approx(1.0)
    assert row[6:].abs().max() == 0


def test_a_model_without_key_heads_of_its_own_setting() -> None:
    """GPT-2's configuration has none, nor those of OPT, BLOOM and GPT-NeoX."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=29, n_positions=64, attn_implementation="eager")
    model = GPT2LMHeadModel(config).double().eval()
    explored = ExploredModel(model, "gpt2")
    assert (explored.heads, explored.kv_heads) == (4, 4)
    check_predictions(explored.trace(TOKENS), model)


@pytest.mark.parametrize("config", [BertConfig(**SIZES), Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])])
def test_maps_that_are_not_causal_or_not_of_every_layer_are_refused(config: Any) -> None:
    """Nothing that such a model says of the next token would be right, or its page would lack layers."""
    explored = ExploredModel(AutoModelForCausalLM.from_config(config), "m")
    with pytest.raises(ValueError, match=r"m cannot be shown: .* does not return a causal map of every head and layer"):
        explored.trace(TOKENS)


def test_a_model_without_heads_or_that_writes_no_text_is_refused() -> None:
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=29, hidden_size=8, num_hidden_layers=1))
    for model in (mamba, make("diff").model):
        with pytest.raises(
            ValueError, match=f"m must be a causal language model with attention, got {type(model).__name__}"
        ):
            ExploredModel(model, "m")
