"""Adds to torch what torchtitan 0.3 expects of it. Imported before anything of torchtitan.

Each part goes when its condition no longer holds; on a GPU with torch 2.14 none is needed.
"""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules


def apply() -> None:
    """Add what is missing here."""
    if not hasattr(dist, "set_timeout"):  # until torch 2.14
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]  # private
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:  # until torch 2.14
            schedule.step = _step_of_microbatches  # type: ignore[method-assign, assignment]  # more arguments
    if not torch.accelerator.is_available():  # torchtitan takes "cuda" then
        _compute_on_cpu()


def _step_of_microbatches(
    self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any = None, **_: Any
) -> None:
    for stage in getattr(self, "_stages", None) or [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(
        arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs, target_mbs, losses, return_outputs=False, loss_kwargs=loss_kwargs
    )


def _compute_on_cpu() -> None:
    from torchtitan.tools import utils as tools

    tools.device_type = "cpu"
    tools.device_module = SimpleNamespace(
        **vars(torch.cpu),
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    from torchtitan.distributed import utils  # reads those two

    utils.set_pg_timeouts = lambda **_: None  # whose barrier names a device, which gloo does not take
