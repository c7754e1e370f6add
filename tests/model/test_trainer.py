"""Under transformers' Trainer: every target of a step weighs the same, in whatever batches it comes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments, default_data_collator
from transformers.trainer_pt_utils import LabelSmoother

import diff_transformer.model
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from loss_weighting import QUIET_ON_CPU, Document, GradientRecorder, check_step, check_weights, exact_step
from tiny_model import LAST_FORMS, SIZES, make

pytestmark = pytest.mark.usefixtures("accelerate_afresh")

# How many tokens each document has, and how many at its end are targets: one document has none at all.
LENGTHS, TARGETS = (10, 3, 7, 10, 2, 10, 5, 9), (9, 1, 2, 0, 1, 4, 4, 8)


def documents() -> list[Document]:
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(1, 29, (length,), generator=generator) for length in LENGTHS]
    ignored = [torch.arange(len(row)) < len(row) - targets for row, targets in zip(tokens, TARGETS, strict=True)]
    return [(row, row.masked_fill(mask, -100)) for row, mask in zip(tokens, ignored, strict=True)]


def padded(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Documents side by side, as long as the longest of them."""

    def rows(name: str, fill: int) -> Tensor:
        values = [torch.tensor(example[name]) for example in examples]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    mask = [torch.ones(len(example["input_ids"]), dtype=torch.long) for example in examples]
    return {
        "input_ids": rows("input_ids", 0),
        "labels": rows("labels", -100),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(mask, batch_first=True),
    }


COLLATORS: dict[str, Callable[[Any], Any]] = {
    "padded": padded,
    "flattened": DataCollatorWithFlattening(),
    "flattened, ends given": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
}


def trainer_of(
    model: DiffTransformerForCausalLM, folder: Path, batch: int, accumulation: int = 1, collator: str = "padded"
) -> Trainer:
    """Steps of all documents each, by plain SGD."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        learning_rate=0.05,
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        **QUIET_ON_CPU,
    )
    data = [{"input_ids": tokens.tolist(), "labels": labels.tolist()} for tokens, labels in documents()]
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=COLLATORS[collator])


def train(trainer: Trainer) -> tuple[list[float], GradientRecorder]:
    """The logged loss and the gradients of each step."""
    recorder = GradientRecorder()
    trainer.add_callback(recorder)
    # Older versions (5.4 is one, fixed by 5.17) let accelerate divide the gradient by the accumulation steps once more,
    # Llama's too. A step of plain SGD makes up for that exactly; in newer versions the factor is 1.
    more = trainer.accelerator.gradient_accumulation_steps
    trainer.args.learning_rate *= more
    trainer.train()
    for step in recorder.steps:
        step.update({name: value * more for name, value in step.items()})
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], recorder


@pytest.mark.parametrize("kind", LAST_FORMS)
@pytest.mark.parametrize("collator", COLLATORS)
def test_every_target_weighs_the_same(kind: str, collator: str, tmp_path: Path) -> None:
    start = make(kind, torch.float32)
    expected = exact_step(start, documents())
    models = {}
    for batch, accumulation in ((8, 1), (2, 4), (1, 8)):
        model = copy.deepcopy(start)
        trainer = trainer_of(model, tmp_path / str(batch), batch, accumulation, collator)
        losses, recorder = train(trainer)
        assert trainer.model_accepts_loss_kwargs
        assert len(losses) == len(recorder.steps) == 2
        check_step(losses[0], recorder.steps[0], expected)
        models[batch] = (model, losses[1])
    for model, second in models.values():
        check_weights(model, models[8][0], start)
        assert second == pytest.approx(models[8][1], abs=6e-5)


def test_smoothed_labels_are_of_the_next_token(tmp_path: Path) -> None:
    """The Trainer computes this loss itself, and shifts the labels of classes that it knows to be causal."""
    model = make("diff", torch.float32)
    trainer = trainer_of(model, tmp_path, 8)
    trainer.label_smoother = LabelSmoother(epsilon=0.1)
    batch = COLLATORS["padded"](trainer.train_dataset)
    loss = trainer.compute_loss(model, dict(batch))
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
def test_the_parts_of_a_batch_of_classes_are_a_mean(head: str, is_causal: bool, tmp_path: Path) -> None:
    """Of equal parts, so that it is the gradient of the whole batch."""
    torch.manual_seed(0)
    config = DiffTransformerConfig(**SIZES, is_causal=is_causal, num_labels=3, pad_token_id=0)
    start = getattr(diff_transformer.model, f"DiffTransformerFor{head}")(config)
    tokens = torch.randint(1, SIZES["vocab_size"], (8, 6), generator=torch.Generator().manual_seed(1))
    rows = tokens.tolist()
    labels = [row[0] % 3 if head == "SequenceClassification" else [token % 3 for token in row] for row in rows]
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    found = []
    for batch, accumulation in ((8, 1), (2, 4)):
        model = copy.deepcopy(start)
        arguments = trainer_of(model, tmp_path / str(batch), batch, accumulation).args
        trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=default_data_collator)
        losses, recorder = train(trainer)
        found.append((losses[0], recorder.steps[0]))
    (whole, gradient), (of_parts, of_mean) = found
    assert of_parts == pytest.approx(whole, abs=1e-4)
    for name, value in gradient.items():
        torch.testing.assert_close(of_mean[name], value, rtol=1e-3, atol=1e-6)
