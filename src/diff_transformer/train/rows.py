"""The loss of some rows of a batch, as every part of training computes it."""

from torch import Tensor, nn

from diff_transformer.data.packing import flattened
from diff_transformer.train.distributed import Processes


def loss_of_rows(call: nn.Module, rows: dict[str, Tensor], items: Tensor, processes: Processes) -> Tensor:
    """The summed loss of rows, divided by `items`.

    Args:
        call: the model, or DDP's wrapper around it.
        rows: (n, N) on the CPU, as `Batches` gives them; documents in them are isolated without a mask.
        items: a scalar.
        processes: this one's device and precision.
    """
    arguments = {
        name: value.to(processes.device) if isinstance(value, Tensor) else value
        for name, value in flattened(rows).items()
    }
    with processes.autocast():
        return call(**arguments, num_items_in_batch=items, use_cache=False, chunked_loss=True).loss
