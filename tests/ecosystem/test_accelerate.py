"""A bare loop of accelerate's: the same steps as without it, and bit-equal after a restart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from diff_transformer import DiffTransformerForCausalLM
from tiny_model import DIFFERENTIAL

Model = DiffTransformerForCausalLM
LENGTH, BATCH, ACCUMULATION = 10, 2, 2


def data() -> Tensor:
    return torch.randint(0, 256, (16, LENGTH), generator=torch.Generator().manual_seed(1))


class Loop:
    """Everything that accelerate prepares and saves."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader = DataLoader(data(), batch_size=BATCH)  # type: ignore[arg-type]  # a tensor is a sequence of its rows
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def run(self, start: int, stop: int) -> list[float]:
        """The batches from `start` up to `stop`, two to a step of the optimizer."""
        losses = []
        for number, batch in enumerate(self.loader):
            if not start <= number < stop:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.accelerator.unwrap_model(self.model).named_parameters()}


def by_hand(model: Model, batches: int) -> Model:
    """The same with torch alone, both halves of a step as one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, batch in enumerate(data()[: batches * BATCH].split(BATCH * ACCUMULATION)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model


def test_accumulated_steps_equal_whole_batches(kind: str, make: Callable[..., Model]) -> None:
    loop = Loop(make(kind).double())
    loop.run(0, 6)
    expected, start = by_hand(make(kind).double(), 6), make(kind).double()
    for name, weight in loop.weights().items():
        moved = (expected.get_parameter(name) - start.get_parameter(name)).abs().max()
        assert moved > 1e-3, name
        # Adam divides by the gradient's own size: where that is near its eps of 1e-8 rounding shows.
        assert (weight - expected.get_parameter(name)).abs().max() < 1e-6 * moved, name


def test_a_saved_state_goes_on_bit_for_bit(kind: str, make: Callable[..., Model], tmp_path: Path) -> None:
    uninterrupted = Loop(make(kind))
    losses = uninterrupted.run(0, 8)

    first = Loop(make(kind))
    begun = first.run(0, 4)
    first.accelerator.save_state(str(tmp_path))
    assert (tmp_path / "model.safetensors").is_file()

    second = Loop(make(kind, initializer_range=0.1))
    second.accelerator.load_state(str(tmp_path))
    assert all(torch.equal(weight, first.weights()[name]) for name, weight in second.weights().items())
    assert begun + second.run(4, 8) == losses
    for name, weight in second.weights().items():
        assert torch.equal(weight, uninterrupted.weights()[name]), name
        assert weight.dtype == torch.float32


@pytest.mark.parametrize("kind", DIFFERENTIAL)
def test_mixed_precision_leaves_the_weights_and_lambda_in_float32(kind: str, make: Callable[..., Model]) -> None:
    exact, mixed = make(kind), Loop(make(kind), mixed_precision="bf16")
    batch = data()[:BATCH]
    mixed.accelerator.backward(mixed.model(input_ids=batch, labels=batch).loss)
    exact(input_ids=batch, labels=batch).loss.backward()
    for (name, parameter), (_, reference) in zip(mixed.model.named_parameters(), exact.named_parameters(), strict=True):
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        expected = reference.grad / ACCUMULATION  # which accelerate divides by
        # Dozens of roundings to bfloat16, of 1/256 each, lie on the way; a mistake would be as large as the gradient.
        assert 0 < (parameter.grad - expected).norm() < 0.25 * expected.norm(), name
    assert mixed.accelerator.unwrap_model(mixed.model).lambdas() == exact.lambdas()
