"""LoRA on the projections of every attention type, and λ beside it; methods that find their layers; prefix tuning."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import DynamicCache

import fresh
from byte_models import make, tokens, train
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import text_embeddings
from diff_transformer.model.cache import CACHE_NAME
from full_run import short_run
from tiny_model import DIFFERENTIAL, KINDS, NOT_LATENT, PAIRED
from tiny_model import check_rounding as check

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# What makes λ in each kind: four vectors in a layer, or a projection of the token.
LAMBDA = {kind: ATTENTION_TYPES[kind].lambda_modules[0] for kind in DIFFERENTIAL}

# transformers has renamed what PEFT asks a model for, and what its older versions know by this name only.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **{"target_modules": PROJECTIONS, **settings})


def copies(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by the name they have without it."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name.removeprefix("base_model.model."), module


def test_adapters_are_trained_saved_loaded_and_merged(kind: str, tmp_path: Path) -> None:
    model, inputs = get_peft_model(make(kind), lora()), tokens()
    before = copies(model)
    losses = train(model, inputs)
    assert losses[-1] < losses[0] - 0.05
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != (".lora_" in name), name
    assert sum(".lora_B." in name for name in before) == 2 * len(PROJECTIONS)
    expected = model(inputs).logits.detach()

    model.save_pretrained(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".safetensors"]
    assert torch.equal(PeftModel.from_pretrained(make(kind), tmp_path)(inputs).logits, expected)
    with model.disable_adapter():
        assert torch.equal(model(inputs).logits, make(kind)(inputs).logits)
        assert not torch.equal(model(inputs).logits, expected)

    products = {
        f"{name}.weight": module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
        for name, module in adapted(model)
    }
    merged, original = model.merge_and_unload(), make(kind)
    assert type(merged) is DiffTransformerForCausalLM
    check(merged(inputs).logits, expected)
    for name, parameter in merged.named_parameters():
        check(parameter, original.get_parameter(name) + products.get(name, 0.0))
        assert name in products or torch.equal(parameter, original.get_parameter(name)), name
    assert len(products) == 2 * len(PROJECTIONS)


def test_all_linear_means_every_projection_but_the_head(kind: str) -> None:
    model = get_peft_model(make(kind), lora(target_modules="all-linear"))
    names = {name.rpartition(".")[2] for name, _ in adapted(model)}
    extra = {"lambda_proj"} if ATTENTION_TYPES[kind].lambda_per_token else set()
    extra |= {"q_a_proj", "kv_a_proj"} if ATTENTION_TYPES[kind].latent else set()
    assert names == {*PROJECTIONS, "gate_proj", "up_proj", "down_proj"} | extra


@pytest.mark.parametrize("kind", list(LAMBDA))
def test_lambda_can_be_trained_beside_the_adapters(kind: str, tmp_path: Path) -> None:
    def parameters(model: Any) -> dict[str, Tensor]:
        return {name: p for name, p in model.named_parameters() if f".{LAMBDA[kind]}.modules_to_save." in name}

    model = get_peft_model(make(kind).bfloat16(), lora(modules_to_save=[LAMBDA[kind]]))
    start = {name: parameter.detach().clone() for name, parameter in parameters(model).items()}
    assert len(start) == 2 * (4 if kind in PAIRED else 1)  # of two layers
    train(model, tokens())
    for name, parameter in parameters(model).items():
        assert not torch.equal(parameter, start[name]), name
        assert parameter.dtype == (torch.float32 if kind in PAIRED else torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(kind).bfloat16(), tmp_path)
    inputs = tokens()
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)
    for name, parameter in parameters(loaded).items():
        assert torch.equal(parameter, parameters(model)[name])
        assert parameter.dtype == parameters(model)[name].dtype
    lambdas = model.lambdas()
    merged = model.merge_and_unload()
    assert merged.lambdas() == lambdas
    if kind in PAIRED:
        assert lambdas is not None
        assert len(lambdas) == 2
        assert all(now != was for now, was in zip(lambdas, make(kind).lambdas(), strict=True))
        assert all(p.dtype == torch.float32 for name, p in merged.named_parameters() if ".lam." in name)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's word for any norm but torch's
@pytest.mark.parametrize("way", ["beside the adapters", "LN tuning"])
@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa"])
def test_the_headwise_norm_can_be_trained(implementation: str, way: str) -> None:
    """The operator applies the norm itself, but a wrapper's, with its call and weight and nothing else, is called."""
    tuning = peft.LNTuningConfig(target_modules=["head_norm"], task_type=TaskType.CAUSAL_LM)
    config = tuning if way == "LN tuning" else lora(modules_to_save=["head_norm"])
    model = get_peft_model(make("diff", attn_implementation=implementation), config)
    inputs = tokens()
    check(model(inputs).logits, make("diff")(inputs).logits)
    losses = train(model, inputs)
    assert losses[-1] < losses[0]
    expected = model(inputs).logits.detach()
    with model.disable_adapter():
        check(model(inputs).logits, make("diff")(inputs).logits)
    merged = model.merge_and_unload()
    check(merged(inputs).logits, expected)
    name = "model.layers.0.self_attn.head_norm.weight"
    assert not torch.equal(merged.get_parameter(name), make("diff").get_parameter(name))


# PEFT's methods; all but prompts and P-tuning find their layers themselves, which are those of a Llama.
METHODS: dict[str, peft.PeftConfig] = {
    "LoRA": LoraConfig(r=2),
    "IA3": peft.IA3Config(),
    "LoHa": peft.LoHaConfig(r=2),
    "AdaLoRA": peft.AdaLoraConfig(init_r=2, target_r=1, total_step=9),
    "VeRA": peft.VeraConfig(r=2),
    "DoRA": LoraConfig(r=2, use_dora=True),
    "LN tuning": peft.LNTuningConfig(),
    "OFT": peft.OFTConfig(oft_block_size=4),
    "P-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
    "prompt tuning": PromptTuningConfig(num_virtual_tokens=3),
}
ADAPTED = {name: {"q_proj", "v_proj"} for name in ("LoRA", "LoHa", "AdaLoRA", "VeRA")}
ADAPTED["IA3"] = {"k_proj", "v_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT's word for any norm but torch's
@pytest.mark.parametrize("method", short_run(METHODS, [*ADAPTED, "DoRA", "prompt tuning"]))
def test_methods_train(kind: str, method: str) -> None:
    config = copy.deepcopy(METHODS[method])
    config.task_type = TaskType.CAUSAL_LM
    model = get_peft_model(make(kind), config)
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    assert layers == ADAPTED.get(method, layers)
    losses = train(model, tokens())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "imports", short_run(["diff_transformer, peft", "peft, diff_transformer"], ["peft, diff_transformer"])
)
def test_peft_knows_the_layers_whichever_is_imported_first(imports: str) -> None:
    code = (
        f"import {imports}, sys; from peft.utils import constants;"
        "print(constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING['diff_transformer'],"
        "len([finder for finder in sys.meta_path if 'diff_transformer' in type(finder).__module__]));"
        "from transformers import AutoConfig; print(type(AutoConfig.for_model('diff_transformer')).__name__)"
    )
    if imports.startswith("diff_transformer"):  # before transformers too, which peft looks for and then imports
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    else:
        ran = fresh.run(code)
    assert ran.stdout.splitlines() == ["['q_proj', 'v_proj'] 0", "DiffTransformerConfig"], ran.stderr[-500:]


def test_without_peft_nothing_is_missed() -> None:
    code = (
        "import sys; sys.modules['peft'] = None; import diff_transformer;"
        "from diff_transformer import DiffTransformerConfig; print('peft.utils' in sys.modules)"
    )
    ran = fresh.run(code)
    assert ran.stdout == "False\n", ran.stderr[-500:]


# DIFF's cache has heads of 2d, which PEFT does not know, and that of latents values of no width.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PAIRED and kind in NOT_LATENT])
@pytest.mark.parametrize("projection", [False, True], ids=["values", "projected"])
def test_prefix_tuning(kind: str, projection: bool, tmp_path: Path) -> None:
    settings = {"num_virtual_tokens": 3, "prefix_projection": projection, "encoder_hidden_size": 8}
    model = get_peft_model(make(kind), PrefixTuningConfig(task_type="CAUSAL_LM", **settings))
    inputs = tokens()
    losses = train(model, inputs, steps=6)
    assert losses[-1] < losses[0] - 0.05
    expected = model(inputs).logits.detach()

    cache = DynamicCache()
    for layer, prefix in enumerate(model.get_prompt(batch_size=2).layers):
        cache.update(prefix.keys, prefix.values, layer)
    mask = torch.ones(2, 3 + inputs.shape[1])
    check(make(kind)(inputs, past_key_values=cache, attention_mask=mask).logits, expected)

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(kind), tmp_path)
    check(loaded(inputs).logits, expected)
    arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    arguments |= {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
    if CACHE_NAME == "cache":  # PEFT 0.21 knows the old name alone, and a Llama writes as if there were no prefix
        with pytest.raises(ValueError, match="name one cache, got both"):
            loaded.generate(**arguments)
        return
    written = loaded.generate(**arguments)
    for length in range(inputs.shape[1], written.shape[1]):
        assert torch.equal(loaded(written[:, :length]).logits[:, -1].argmax(-1), written[:, length])


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")  # of generate
@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cached", "uncached"])
def test_text_behind_tuned_prompts(kind: str, options: dict[str, bool]) -> None:
    if not options and CACHE_NAME == "cache":
        pytest.skip("PEFT 0.21 does not find the cache by this name, and takes every step for the first")
    model = get_peft_model(make(kind), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)).eval()
    inputs = tokens()
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **settings, **options)
    for length in range(inputs.shape[1], written.shape[1]):
        assert torch.equal(model(written[:, :length]).logits[:, -1].argmax(-1), written[:, length])


def test_a_corrected_head_and_its_lambda_can_be_trained_beside_the_adapters() -> None:
    """The wrapper holds the original and a copy, and λ is that of the copy."""
    model = get_peft_model(make("dex"), lora(modules_to_save=["dex"]))
    before = make("dex").lambdas()
    assert model.lambdas() == before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".modules_to_save." in name and name.endswith("learned"):
                parameter.add_(1.0)
    model.set_dex_progress(1.0)
    lambdas = model.lambdas()
    assert lambdas is not None
    assert len(lambdas) == len(before)
    assert all(now != was for now, was in zip(lambdas, before, strict=True))


def test_embeddings_of_an_adapted_model(kind: str) -> None:
    model, inputs = get_peft_model(make(kind), lora()), tokens()
    vectors = text_embeddings(model, inputs)
    check(vectors, text_embeddings(make(kind), inputs))
    prompted = get_peft_model(make(kind), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    with pytest.raises(ValueError, match="knows no learned prompts, got a model with PEFT's PROMPT_TUNING"):
        text_embeddings(prompted, inputs)
    vectors.sum().backward()
    assert any(parameter.grad is not None for _, parameter in model.named_parameters())
