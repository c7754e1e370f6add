"""A bare loop of accelerate's is bit-equal after a restart."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from byte_models import make
from diff_transformer import DiffTransformerForCausalLM

Model = DiffTransformerForCausalLM
LENGTH, BATCH, ACCUMULATION = 10, 2, 2


def data() -> Tensor:
    return torch.randint(0, 256, (16, LENGTH), generator=torch.Generator().manual_seed(1))


class Loop:
    """Everything that accelerate prepares and saves."""

    def __init__(self, model: Model) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
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


def test_a_saved_state_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
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
