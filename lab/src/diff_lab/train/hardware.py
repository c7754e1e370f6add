"""Knows what devices can do: memory, peak and bandwidth of GPUs by their datasheets, a CPU's peak by measurement."""

import functools
import re
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from diff_lab.train.recipe import Precision

NODE = 8  # GPUs of a machine, as the vendors build them
_SIZE, _SECONDS = 1024, 0.25  # of the matrices that a CPU multiplies, and for how long at most


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. A bandwidth is None where machines differ, or have no such network."""

    name: str  # what a user calls it
    # A regular expression for all of torch's name. A part of a GPU (MIG) has a longer one, and so have weaker relatives
    # ("… Laptop GPU").
    device_names: str
    memory_gib: float  # as torch sees it; the driver keeps some of what is built in
    half: float  # FLOP/s of dense bf16 and fp16 matrix products that add up in float32
    tf32: float  # FLOP/s of float32 matrix products on tensor cores
    float32: float  # and off them
    link: float | None  # bytes/s that it can receive from the other GPUs of its machine
    network: float | None  # bytes/s of the network card that its vendor's machine has for each GPU

    def peak(self, precision: Precision, tf32: bool = False) -> float:
        """FLOP/s in a precision of a recipe; "no" is float32, by the tensor cores where `tf32` is allowed."""
        if precision != "no":
            return self.half
        return self.tf32 if tf32 else self.float32


# FLOP/s from the vendors' datasheets; where they print the number for sparse matrices, half of it. Then bytes/s in one
# direction, half of the datasheets' sums of both: NVLink (1800, 900 and 600 GB/s), AMD's Infinity Fabric (7 × 128), or
# else PCIe x16 (128 GB/s in its fifth generation, 64 in its fourth), also where bridges join some pairs of a machine.
# Last the network: DGX B200, H200 and H100 have a card of 400 Gb/s for each GPU, DGX A100 has one of 200, and AMD's
# reference network for the MI300X one of 400.
_DATASHEETS = (
    Gpu("b200", r"NVIDIA B200", 178, 2250e12, 1125e12, 75e12, 900e9, 50e9),
    Gpu("h200", r"NVIDIA H200", 139.8, 989.5e12, 494.7e12, 67e12, 450e9, 50e9),
    Gpu("h200-nvl", r"NVIDIA H200 NVL", 139.8, 835.5e12, 417.5e12, 60e12, 64e9, None),
    Gpu("h100", r"NVIDIA H100 80GB HBM3", 79.1, 989.5e12, 494.7e12, 67e12, 450e9, 50e9),
    Gpu("h100-pcie", r"NVIDIA H100 PCIe", 79.1, 756e12, 378e12, 51e12, 64e9, None),
    Gpu("h100-nvl", r"NVIDIA H100 NVL", 93, 835.5e12, 417.5e12, 60e12, 64e9, None),
    Gpu("gh200", r"NVIDIA GH200 480GB", 94.5, 989.5e12, 494.7e12, 67e12, None, None),
    Gpu("a100-80", r"NVIDIA A100(-SXM4-80GB|-PCIE-80GB| 80GB PCIe)", 79.1, 312e12, 156e12, 19.5e12, 300e9, 25e9),
    Gpu("a100-40", r"NVIDIA A100-(SXM4|PCIE)-40GB", 39.4, 312e12, 156e12, 19.5e12, 300e9, 25e9),
    Gpu("mi300x", r"AMD Instinct MI300X( OAM)?", 191.5, 1307.4e12, 653.7e12, 163.4e12, 448e9, 50e9),
    Gpu("l40s", r"NVIDIA L40S", 44.4, 362e12, 183e12, 91.6e12, 32e9, None),
    Gpu("l4", r"NVIDIA L4", 22, 121e12, 60e12, 30.3e12, 32e9, None),
    Gpu("a10g", r"NVIDIA A10G", 22, 70e12, 35e12, 35e12, 32e9, None),
    Gpu("rtx-6000-ada", r"NVIDIA RTX 6000 Ada Generation", 47.4, 364.2e12, 182.1e12, 91.1e12, 32e9, None),
    Gpu("rtx-a6000", r"NVIDIA RTX A6000", 47.4, 154.8e12, 77.4e12, 38.7e12, 32e9, None),
    Gpu("rtx-5090", r"NVIDIA GeForce RTX 5090", 31.4, 209.5e12, 104.8e12, 104.8e12, 64e9, None),
    Gpu("rtx-4090", r"NVIDIA GeForce RTX 4090", 23.5, 165.2e12, 82.6e12, 82.6e12, 32e9, None),
    Gpu("rtx-3090", r"NVIDIA GeForce RTX 3090", 23.6, 71e12, 35.6e12, 35.6e12, 32e9, None),
)
GPUS = {gpu.name: gpu for gpu in _DATASHEETS}


def gpu_named(name: str) -> Gpu:
    """A GPU of the table, however its name is spelt: "RTX 4090" is "rtx-4090". Raises ValueError for an unknown one."""
    key = re.sub(r"[\s_-]+", "-", name.strip().lower())
    if key not in GPUS:
        raise ValueError(f"GPU {name!r} is not known; known ones are {', '.join(GPUS)}.")
    return GPUS[key]


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """The most FLOP/s that `device` can do in a precision of a recipe: what utilisation is a share of.

    For a GPU it is the datasheet's number, and None for one that is not in the table, for a part of one, and for other
    devices. float32 counts TF32's where torch is set to use it. For the CPU it is what a product of two large matrices
    reaches with the threads of now, measured once in a process, in a quarter of a second; fp16, in which nothing is
    trained there, has none.
    """
    if device.type == "cpu":
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return None if precision == "fp16" else _measured(dtype, torch.get_num_threads())
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    gpu = next((gpu for gpu in GPUS.values() if re.fullmatch(gpu.device_names, name)), None)
    return None if gpu is None else gpu.peak(precision, torch.backends.cuda.matmul.fp32_precision == "tf32")


@functools.cache
def _measured(dtype: torch.dtype, threads: int) -> float:
    """The fastest of some products: what other programs take meanwhile is no limit of the processor."""
    # No random numbers: they would not be there for training. Of ones no product is rare in any way.
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    timer = Timer("torch.mm(matrix, matrix)", globals={"torch": torch, "matrix": matrix}, num_threads=threads)
    return 2 * _SIZE**3 / min(timer.blocked_autorange(min_run_time=_SECONDS).times)
