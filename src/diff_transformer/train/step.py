"""The batches of a run's steps, and the gradients of one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.data.packing import IGNORED, flattened
from diff_transformer.train.distributed import Processes
from diff_transformer.train.inspection import inspect, reduced


def prefetched(
    batch_of: Callable[[int], dict[str, Tensor]], first: int, last: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The steps `first` … `last` with their batches; the next one is made by a thread while one is worked on."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(batch_of, first)
        for step in range(first, last + 1):
            batch = coming.result()
            if step < last:
                coming = thread.submit(batch_of, step + 1)
            yield step, batch


def backward(
    call: nn.Module, batch: dict[str, Tensor], processes: Processes, scaler: torch.amp.GradScaler, parts: int
) -> float:
    """Gradients of one step's loss: the mean over all its targets, however they are spread over parts and processes."""
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    # What processes exchange is averaged, so each counts its own part as many times as there are of them.
    items = targets / processes.shares
    total = torch.zeros((), device=processes.device)
    own = processes.rows(batch)
    for part in range(parts):
        piece = rows_on(processes.device, {name: tensor.chunk(parts)[part] for name, tensor in own.items()})
        with processes.no_gradient_exchange(call, part < parts - 1), processes.autocast():
            loss = call(**piece, num_items_in_batch=items, use_cache=False, chunked_loss=True).loss
            scaler.scale(loss).backward()
        total += loss.detach()
    return float(processes.sum(total / processes.shares))


def rows_on(device: torch.device, batch: dict[str, Tensor]) -> dict[str, Tensor | int]:
    """Rows of a batch as the model takes them: packed documents in one row, with where they begin."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in flattened(batch).items()}


def inspect_batch(model: Any, batch: dict[str, Tensor], processes: Processes) -> dict[str, list[float]]:
    """Numbers of each layer from one sequence of each process."""
    row = rows_on(processes.device, {name: tensor[:1] for name, tensor in processes.rows(batch).items()})
    with processes.autocast():
        return reduced(inspect(model, row), processes.device)
