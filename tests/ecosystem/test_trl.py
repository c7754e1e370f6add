"""TRL's SFTTrainer: documents one by one or packed, with or without LoRA, on whole texts or completions alone.

And its DPOTrainer, which makes the reference model itself, and its GRPOTrainer, which generates.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from torch import Tensor
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from byte_models import make
from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerForCausalLM
from loss_weighting import QUIET_ON_CPU, GradientRecorder, check_step, check_weights, exact_step

disable_progress_bars()

# transformers has renamed what TRL and PEFT ask for, and what its older versions know by this name only.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")

TEXTS = ["the cat sat on a mat", "a dog", "to be, or not to be", "x", "λ", "noise is what both maps have in common"]
QUIET: dict[str, Any] = {**QUIET_ON_CPU, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False}
LORA = {"r": 2, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def trainer_of(
    model: DiffTransformerForCausalLM, folder: Path, data: dict[str, list[str]], **settings: Any
) -> SFTTrainer:
    peft_config = settings.pop("peft_config", None)
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "learning_rate": 0.03,
        "per_device_train_batch_size": 2,
        "max_length": 48,
    }
    arguments = SFTConfig(output_dir=str(folder), **{**QUIET, **defaults, **settings})
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
    )


def losses(trainer: SFTTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def documents(batch: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document of a batch, packed or padded."""
    if "position_ids" not in batch:
        rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
        return [(tokens[real], labels[real]) for tokens, labels, real in rows]
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], batch["position_ids"].shape[1]]
    return [
        (batch["input_ids"][0, start:end], batch["labels"][0, start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_it_trains(kind: str, packing: bool, peft: bool, tmp_path: Path) -> None:
    model = make(kind)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lora = LoraConfig(task_type="CAUSAL_LM", **LORA) if peft else None
    trainer = trainer_of(
        model, tmp_path, {"text": ["to be, or not to be"] * 4}, packing=packing, peft_config=lora, learning_rate=0.02
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert ("position_ids" in batch) == packing
    computed = losses(trainer)
    assert len(computed) == 4
    assert computed[-1] < computed[0] - 0.1
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name for name in trained) == peft
    for name, parameter in trainer.model.named_parameters():
        old = before.get(name.removeprefix("base_model.model.").replace(".base_layer", ""))
        if old is not None:
            assert torch.equal(parameter, old) == peft, name


@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa"])
def test_packed_documents_do_not_see_each_other(kind: str, implementation: str, tmp_path: Path) -> None:
    model = make(kind, attn_implementation=implementation)
    trainer = trainer_of(model, tmp_path, {"text": TEXTS}, packing=True, per_device_train_batch_size=3)
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(documents(batch)) == len(TEXTS)
    assert batch["input_ids"].shape[0] == 1
    expected = exact_step(model, documents(batch))[0]
    # Early versions of TRL tell documents apart by their positions alone; later ones name their ends as well.
    by_positions = {name: value for name, value in batch.items() if name in ("input_ids", "labels", "position_ids")}
    with torch.no_grad():
        for given in (batch, by_positions):
            assert trainer.compute_loss(model, dict(given)).item() == pytest.approx(expected, rel=1e-5)


# Completions of one target (their end) to many, in rows of which the longest has 40 tokens.
PROMPTS = ["the cat sat", "a dog", "to be,", "x", "λ", "noise", "what", "two"]
COMPLETIONS = [
    " on a mat",
    "",
    " or not to be",
    "y",
    " is learned",
    " is what both maps have in common",
    "?",
    " halves",
]
# How SFTTrainer lays documents out, and how many rows all of them make.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "padded": ({}, 8),
    "padding-free": ({"padding_free": True, "max_length": None}, 8),
    "packed": ({"packing": True, "max_length": 40}, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_target_weighs_the_same(kind: str, layout: str, tmp_path: Path) -> None:
    """Batches with few targets and with many make the step, and the logged loss, that one batch of all makes."""
    settings, rows = LAYOUTS[layout]
    start = make(kind)
    models, logged = [], []
    for accumulation in (1, 4):
        model = copy.deepcopy(start)
        trainer = trainer_of(
            model,
            tmp_path / str(accumulation),
            {"prompt": PROMPTS, "completion": COMPLETIONS},
            per_device_train_batch_size=rows // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            **settings,
        )
        batches = list(trainer.get_train_dataloader())
        assert len(batches) == accumulation
        read = [document for batch in batches for document in documents(batch)]
        assert len(read) == len(PROMPTS)
        recorder = GradientRecorder()
        trainer.add_callback(recorder)
        # Older versions of transformers let accelerate divide once more by the steps; in newer ones the factor is 1
        # (tests/model/test_trainer.py).
        more = trainer.accelerator.gradient_accumulation_steps
        trainer.args.learning_rate *= more
        computed = losses(trainer)
        check_step(
            computed[0], {name: value * more for name, value in recorder.steps[0].items()}, exact_step(start, read)
        )
        models.append(model)
        logged.append(computed[1])
    check_weights(models[1], models[0], start)
    assert logged[1] == pytest.approx(logged[0], abs=6e-5)


def test_gradient_checkpointing_with_lora(tmp_path: Path) -> None:
    """TRL's own default."""

    def run(folder: str, checkpointing: bool) -> list[float]:
        lora = LoraConfig(task_type="CAUSAL_LM", **LORA)
        trainer = trainer_of(
            make("diff"), tmp_path / folder, {"text": TEXTS}, peft_config=lora, gradient_checkpointing=checkpointing
        )
        return losses(trainer)

    assert run("with", True) == run("without", False)


def test_preferences_against_a_reference_that_the_trainer_loads(kind: str, tmp_path: Path) -> None:
    """Without ``ref_model`` it loads the model's folder anew, by the ``auto_map`` of its configuration, or without."""
    make(kind).save_pretrained(tmp_path)
    if kind == "softmax":
        settings = json.loads((tmp_path / "config.json").read_text())
        del settings["auto_map"]
        (tmp_path / "config.json").write_text(json.dumps(settings))
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments = DPOConfig(
        str(tmp_path / "out"), max_steps=2, learning_rate=0.001, per_device_train_batch_size=2, **QUIET
    )
    data = {"prompt": ["the cat", "a dog"], "chosen": [" sat", " ran"], "rejected": [" flew", " sang"]}
    trainer = DPOTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(data), processing_class=byte_tokenizer()
    )
    trainer.train()
    first, second = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert first == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is the model itself
    assert second < first - 0.01
    for name, parameter in trainer.accelerator.unwrap_model(trainer.ref_model).named_parameters():
        assert torch.equal(parameter, start[name]), name
        assert not torch.equal(model.get_parameter(name), start[name]), name


def test_texts_that_the_trainer_generates_are_rewarded(kind: str, tmp_path: Path) -> None:
    """GRPO: the model that generates is the model that is trained, and what is rewarded becomes likelier."""
    folder = tmp_path / "model"
    make(kind).save_pretrained(folder)
    model = DiffTransformerForCausalLM.from_pretrained(folder)
    sizes = {"per_device_train_batch_size": 16, "num_generations": 16, "max_completion_length": 6}
    arguments = GRPOConfig(str(tmp_path / "out"), max_steps=12, learning_rate=0.03, **sizes, **QUIET)

    def share_of_low_bytes(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token < 64 for token in tokens) / len(tokens) for tokens in completion_ids]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_low_bytes,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["the cat"] * 4}),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5, rewards
