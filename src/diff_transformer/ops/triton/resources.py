"""What each kernel takes of a device, found by compiling it ahead of time: no GPU is needed.

The launches are those that a request would make, planned on tensors without memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.triton.kernel_arguments import are_wide, problem_of
from diff_transformer.ops.triton.launch import Launch, plan_backward, plan_decode, plan_forward

# Bytes of shared memory that a program may have, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class Resources(NamedTuple):
    """Registers of a thread, bytes it spills to memory, and bytes of shared memory of a program."""

    registers: int
    spilled: int
    shared: int


class Configuration(NamedTuple):
    """A request that brings a kernel's default block sizes into play."""

    d: int
    dv: int
    dtype: torch.dtype = torch.bfloat16
    is_causal: bool = True
    window: int | None = None
    has_documents: bool = False
    mask: str | None = None  # "padding", one row for all queries, or "full"
    has_norm: bool = True
    length: int = 4096
    key_heads: int = 8
    key_maps: int = 2

    @property
    def name(self) -> str:
        """In words, for tables."""
        parts = [str(self.dtype).removeprefix("torch."), f"d {self.d}, dv {self.dv}"]
        parts += [f"{8 // self.key_heads} heads to a key head"] if self.key_heads < 8 else []
        parts += ["shared keys"] if self.key_maps == 1 else []
        parts += ["causal"] if self.is_causal else []
        parts += ["window"] if self.window else []
        parts += ["documents"] if self.has_documents else []
        parts += [f"{self.mask} mask"] if self.mask else []
        parts += [f"length {self.length}"] if self.length % 16 else []
        return ", ".join(parts)


def launches(configuration: Configuration, capability: int) -> Iterator[tuple[str, Launch]]:
    """Every launch of a request's forward with and without gradients, backward and decoding, with its name."""
    c, batch, heads, n = configuration, 2, 8, configuration.length

    def empty(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def plan(queries: int, documents: bool) -> Any:
        q = empty(batch, queries, heads, 2, c.d).permute(0, 2, 3, 1, 4)
        k = empty(batch, n, c.key_heads, c.key_maps, c.d).permute(0, 2, 3, 1, 4)
        v = empty(batch, n, c.key_heads, c.dv).transpose(1, 2)
        rows = {None: None, "padding": 1, "full": queries}[c.mask]
        mask = None if rows is None else empty(batch, 1, rows, n, dtype=torch.bool)
        bounds = empty(2, n, dtype=torch.int32) if documents else None
        lam = empty(batch, heads, queries, dtype=torch.float32)
        return problem_of(Request(q, k, v, lam, mask, c.is_causal, c.d**-0.5, c.window, bounds), capability)

    norm = Norm(empty(c.dv, dtype=torch.float32), 1e-5, 0.8) if c.has_norm else None
    problem = plan(n, c.has_documents)
    yield "forward", plan_forward(problem, norm, save=False)[0][0]
    (saving,), out, saved = plan_forward(problem, norm, save=True)
    yield "forward, for gradients", saving
    assert saved is not None
    names = ("rows", "keys and values", "queries") if not are_wide(c.d, c.dv) else ("rows", "keys", "values", "queries")
    yield from zip(names, plan_backward(torch.empty_like(out), problem, norm, saved)[0], strict=True)
    if not c.has_documents:
        yield from zip(("decode", "combine"), plan_decode(plan(1, False), norm, 264)[0], strict=True)


def _source(launch: Launch) -> ASTSource:
    """The launch's kernel, specialised as triton does it at run time."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        signature[name] = "constexpr" if parameter.is_constexpr else mangle_type(value, specialize=True)
        if signature[name] == "constexpr":
            constants[name] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def resources(launch: Launch, capability: int) -> Resources:
    """Compile a launch for a compute capability (90 for 9.0) and read what it takes from the machine code."""
    compiled = triton.compile(_source(launch), target=GPUTarget("cuda", capability, 32), options=launch.options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert usage is not None, done.stdout
    return Resources(int(usage[1]), int(usage[2]), compiled.metadata.shared)
