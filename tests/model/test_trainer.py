"""Under transformers' Trainer: num_items_in_batch is honoured, so accumulation equals one big batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import Trainer, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM


@pytest.fixture(autouse=True)
def _forget_the_device() -> Iterator[None]:
    """accelerate keeps what the Trainer set up for the whole process; the next test may want another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def examples() -> list[dict[str, Tensor]]:
    """Eight sequences with very different numbers of labels: one, or all of them."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, 29, (8, 10), generator=generator)
    labels = tokens.clone()
    labels[::2, 2:] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def train(
    model: DiffTransformerForCausalLM, folder: Path, batch: int, accumulation: int
) -> tuple[list[float], Trainer]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples())
    # Older versions (5.4 is one, fixed by 5.17) let accelerate divide the gradient by the accumulation steps once more,
    # Llama's too. One step of plain SGD makes up for that exactly; in newer versions the factor is 1.
    arguments.learning_rate *= trainer.accelerator.gradient_accumulation_steps
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def test_accumulation_equals_one_big_batch(kind: str, make: Any, tmp_path: Path, check: Any) -> None:
    whole, parts = make(kind, torch.float32), make(kind, torch.float32)
    start = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    losses, trainer = train(whole, tmp_path / "whole", batch=4, accumulation=1)
    accumulated, _ = train(parts, tmp_path / "parts", batch=2, accumulation=2)
    assert trainer.model_accepts_loss_kwargs
    assert len(losses) == len(accumulated) == 3
    assert accumulated == pytest.approx(losses, rel=1e-3)
    for name, parameter in whole.named_parameters():
        moved = (parameter.detach() - start[name]).abs().max().item()
        assert moved > 1e-5, name
        assert (parts.get_parameter(name) - parameter).abs().max().item() < 0.01 * moved, name


def test_without_the_count_it_would_differ(make: Any, tmp_path: Path) -> None:
    """The comparison above notices a loss that is averaged in each micro-batch."""

    class Deaf(DiffTransformerForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            return super().forward(input_ids=input_ids, labels=labels)

    whole, parts = make("diff", torch.float32), make("diff", torch.float32)
    parts.__class__ = Deaf
    start = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    train(whole, tmp_path / "whole", batch=4, accumulation=1)
    train(parts, tmp_path / "parts", batch=2, accumulation=2)
    name = "model.layers.0.self_attn.v_proj.weight"
    moved = (whole.get_parameter(name) - start[name]).abs().max().item()
    assert (parts.get_parameter(name) - whole.get_parameter(name)).abs().max().item() > 0.1 * moved


def test_trainer_saves_what_loads(make: Any, tokens: Any, check: Any, tmp_path: Path) -> None:
    model = make("diff", torch.float32)
    _, trainer = train(model, tmp_path / "run", batch=4, accumulation=1)
    trainer.save_model(str(tmp_path / "model"))
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path / "model")
    inputs = tokens()
    check(loaded(inputs).logits, model.eval()(inputs).logits)
    assert loaded.lambdas() == model.lambdas()
