"""Saving and loading in safetensors, dtypes with λ in float32, the Auto classes, and a model's first parameters."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import fresh
import oracle
from diff_lab.train.run_setup import draw_weights
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerModel
from diff_transformer.model.configuration import code_files
from full_run import short_run
from tiny_model import KINDS, NOT_LATENT, OPTIONS, PAIRED, has_lambda_vectors, make, tokens
from tiny_model import check_rounding as check

# Memory that was never written is NaN here, so a parameter that loading forgot shows.
pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The parameters that the options add to a layer's attention.
OF_OPTIONS = (
    *("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
    *("q_norm.weight", "k_norm.weight", "gate_proj.weight"),
)


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(kind: str, tied: bool, tmp_path: Path) -> None:
    model, inputs = make(kind, torch.float32, tie_word_embeddings=tied, lambda_init=0.4), tokens()
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *code_files(),
    }
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "diff_transformer"
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert not loaded.training
    assert loaded.config.attention_type == kind
    assert loaded.config.lambda_init == 0.4
    assert loaded.config._attn_implementation == "diff_attention"
    assert list(loaded.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    check(loaded(inputs).logits, model(inputs).logits)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


@pytest.mark.parametrize(("kind", "norm"), [(kind, kind not in PAIRED) for kind in KINDS if kind in NOT_LATENT])
def test_the_headwise_norm_of_controls(kind: str, norm: bool, tmp_path: Path) -> None:
    """Table 6's: DIFF without it, the others with one."""
    model, inputs = make(kind, torch.float32, headwise_norm=norm), tokens()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["headwise_norm"] is norm
    assert any("head_norm" in name for name in load_file(tmp_path / "model.safetensors")) is norm
    loaded, report = DiffTransformerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_in_another_dtype(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The file holds every parameter in its own dtype, λ in float32 at least, and it comes back bit for bit."""
    model, inputs = make(kind, dtype), tokens()
    model.save_pretrained(tmp_path)
    for options in ({}, {"dtype": dtype}, {"dtype": "auto"}):
        loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, **options)
        for name, parameter in model.named_parameters():
            loaded_value = loaded.get_parameter(name)
            assert loaded_value.dtype == parameter.dtype, name
            assert torch.equal(loaded_value, parameter), name
        assert loaded(inputs).logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loading_into_half_precision(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of a float32 checkpoint: λ is not rounded, everything else is, and the model runs."""
    model, inputs = make(kind, torch.float32), tokens()
    model.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in model.named_parameters():
        expected = parameter if ".lam." in name else parameter.to(dtype)
        assert loaded.get_parameter(name).dtype == expected.dtype, name
        assert torch.equal(loaded.get_parameter(name), expected), name
    assert loaded.lambdas() == model.lambdas()
    assert loaded(inputs).logits.dtype == dtype


CASTS: dict[str, Callable[[DiffTransformerForCausalLM], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "to, as another tensor": lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
    "each module": lambda model: model.apply(lambda module: module.to(torch.float16)),
    "there and back": lambda model: model.half().float().bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts(kind: str, cast: str) -> None:
    model, inputs = make(kind, torch.float32), tokens()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".lam." in name}
    lambdas = model.lambdas()
    CASTS[cast](model)
    assert model.dtype in (torch.float16, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in before else model.dtype), name
    torch.testing.assert_close({name: model.get_parameter(name) for name in before}, before, rtol=0, atol=0)
    assert model.lambdas() == lambdas
    assert (lambdas is not None) == has_lambda_vectors(kind)
    out = model(inputs)
    assert out.logits.dtype == model.dtype
    assert out.logits.isfinite().all()
    assert {layer.keys.dtype for layer in out.past_key_values.layers} == {model.dtype}


@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa", "eager"])
def test_autocast_equals_half_precision(kind: str, implementation: str) -> None:
    """Logits under autocast are off by bfloat16's rounding: 8 roundings of eps/2 in their root mean square.

    Gradients arrive in float32 everywhere.
    """
    model, inputs = make(kind, torch.float32, attn_implementation=implementation), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs).logits
        cache = model(inputs[:, :6]).past_key_values
        continued = model(inputs[:, 6:], past_key_values=cache).logits
    truth = make(kind, torch.float64, attn_implementation="diff_attention_reference")(inputs).logits
    error = (logits.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    limit = 8 * torch.finfo(torch.bfloat16).eps / 2
    assert 1e-4 < error < limit
    assert (continued.double() - truth[:, 6:]).square().mean().sqrt() < limit * truth.square().mean().sqrt()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs, labels=inputs).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_what_stays_in_float32_is_a_unit_of_its_own(kind: str) -> None:
    """FSDP wants one dtype in a unit; accelerate and the Trainer make a unit of each class that is named so."""
    assert ("Lambda" in make(kind).model._no_split_modules) == has_lambda_vectors(kind)


ROPES: dict[str, Any] = {
    "plain": {},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("how", ["to_empty", "assign", "there and back"])
@pytest.mark.parametrize("kind", [*KINDS, "dex"])
def test_a_state_dict_is_all_that_a_model_is(kind: str, how: str, rope: str) -> None:
    """Without memory at first, as who loads a large model makes one; what no checkpoint holds is right there too."""
    heads = {"dex_heads": [[0, 3], [1]]} if kind == "dex" else {}
    source, inputs = make(kind, torch.float32, **heads, **ROPES[rope]), tokens()
    with torch.device("cpu" if how == "there and back" else "meta"):
        model = DiffTransformerForCausalLM(source.config)
    if how != "assign":
        model = model.bfloat16().to("meta").float().to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), strict=True, assign=how == "assign")
    assert torch.equal(model.eval()(inputs).logits, source(inputs).logits)


def expect_fresh(model: DiffTransformerForCausalLM, names: set[str], std: float = 0.02) -> None:
    """The named parameters are as at the start: matrices N(0, std²), biases 0, norms 1, λ vectors N(0, 0.1²).

    Means and deviations are within five standard errors.
    """
    lam = []
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if name not in names:
            continue
        n = parameter.numel()
        if parameter.dim() == 2:
            assert abs(parameter.std().item() - std) < 5 * std / math.sqrt(2 * n), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(n), name
        elif ".lam." in name:
            lam.append(parameter.detach())
        elif name.endswith(".bias"):
            assert not parameter.any(), name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
    if lam:
        draws = torch.cat(lam)
        assert abs(draws.std().item() - 0.1) < 5 * 0.1 / math.sqrt(2 * len(draws))
        assert abs(draws.mean().item()) < 5 * 0.1 / math.sqrt(len(draws))
        assert len(draws.unique()) == len(draws)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["no options", "options"])
def test_what_a_checkpoint_lacks_is_initialised(options: dict[str, bool], kind: str, tmp_path: Path) -> None:
    model = make(kind, torch.float32, head_dim=32, **options)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    missing = {name for name in saved if ".layers.1." in name or name in ("model.norm.weight", "lm_head.weight")}
    of_lambda = 4 if has_lambda_vectors(kind) else model.config.has_token_lambda
    of_options = 4 if kind == "gdla" else len(OF_OPTIONS)  # the gate's, and three biases
    of_latents = 4 * (kind == "gdla")
    assert len(missing) == 9 + 2 + of_lambda + of_latents + (kind in PAIRED) + (of_options if options else 0)
    remaining = {name: value for name, value in saved.items() if name not in missing}
    save_file(remaining, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = DiffTransformerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == missing
    expect_fresh(loaded, missing)
    torch.testing.assert_close({name: loaded.get_parameter(name) for name in remaining}, remaining, rtol=0, atol=0)


@pytest.mark.parametrize("std", [0.02, 0.1])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["no options", "options"])
def test_start(options: dict[str, bool], std: float, kind: str) -> None:
    """Of a model that is made, and of one that training draws: no weights at first, then memory, then each module's.

    λ is near λ_init: its deviation is 0.1²·√(2d) = 0.08 at d = 32.
    """
    sizes = {"head_dim": 32, "hidden_size": 64, "vocab_size": 300, "initializer_range": std}
    made = make(kind, torch.float32, sharp=False, hidden_act="poly_norm", **sizes, **options)
    with torch.device("meta"):
        drawn = DiffTransformerForCausalLM(made.config)
    drawn.to_empty(device="cpu")
    draw_weights(drawn, seed=3)
    for model in (made, drawn):
        expect_fresh(model, {name for name, _ in model.named_parameters() if ".act_fn." not in name}, std)
        for layer, value in enumerate(model.lambdas() or (), start=1):
            assert abs(value - oracle.lambda_init(layer)) < 5 * 0.08
    if std == 0.02:
        tokens = torch.arange(1, 65)[None]
        assert abs(made(tokens, labels=tokens).loss.item() - math.log(300)) < 0.2


@pytest.mark.parametrize(
    "implementation",
    short_run(["diff_attention", "diff_attention_reference", "sdpa", "eager"], ["diff_attention", "sdpa"]),
)
def test_weights_that_accelerate_keeps_elsewhere(kind: str, implementation: str, tmp_path: Path) -> None:
    """What a large model loads as where the device is too small for it: weights come when their module is called."""
    model, inputs = make(kind, torch.float32, attn_implementation=implementation), tokens()
    model.save_pretrained(tmp_path / "model")
    modules = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**dict.fromkeys(modules, "cpu"), "model.layers.1": "disk"},
        offload_folder=tmp_path / "offloaded",
        attn_implementation=implementation,
    )
    away = {name for name, parameter in loaded.named_parameters() if parameter.is_meta}
    assert away == {name for name, _ in model.named_parameters() if ".layers.1." in name}
    with torch.no_grad():
        check(loaded(inputs).logits, model(inputs).logits)
        cache = loaded(inputs[:, :6]).past_key_values
        check(loaded(inputs[:, 6:], past_key_values=cache).logits, model(inputs).logits[:, 6:])
    assert all(loaded.get_parameter(name).is_meta for name in away)


@pytest.mark.parametrize("kind", PAIRED)
def test_a_lambda_of_two_numbers(kind: str, tmp_path: Path) -> None:
    """It starts at λ_init, trains, and is saved and loaded in float32."""
    model, inputs = make(kind, torch.float32, sharp=False, dual_lambda=True), tokens()
    assert model.lambdas() == pytest.approx([oracle.lambda_init(1), oracle.lambda_init(2)])
    model(inputs, labels=inputs).loss.backward()
    assert all(layer.self_attn.lam.a.grad.any() for layer in model.model.layers)
    model.bfloat16().save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.layers[0].self_attn.lam.a.dtype == torch.float32
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)


def test_auto_classes(kind: str, tmp_path: Path) -> None:
    model, inputs = make(kind, torch.float32), tokens()
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DiffTransformerConfig
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert type(loaded) is DiffTransformerForCausalLM
    assert loaded.config._attn_implementation == "sdpa"
    assert type(AutoModelForCausalLM.from_config(model.config)) is DiffTransformerForCausalLM
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is DiffTransformerModel
    check(base(inputs).last_hidden_state, model.model(inputs).last_hidden_state)


def test_importing_the_package_registers_the_model(tmp_path: Path) -> None:
    """After transformers as well; tests/ecosystem/test_peft.py imports ours first."""
    make("diff", torch.float32).save_pretrained(tmp_path)
    code = (
        "import sys; from transformers import AutoModelForCausalLM; import diff_transformer;"
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    )
    ran = fresh.run(code, tmp_path, warnings_are_errors=True)
    assert ran.stdout == "DiffTransformerForCausalLM\n", ran.stderr[-500:]
