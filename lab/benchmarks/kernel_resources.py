"""Compiles the Triton kernels ahead of time; reports registers, spills, shared memory, slow products. Needs no GPU.

    python lab/benchmarks/kernel_resources.py            # compiles all: lab/benchmarks/kernels.json, docs/kernels.md
    python lab/benchmarks/kernel_resources.py --tables   # prints what kernels.json holds, a line a compilation
    python lab/benchmarks/kernel_resources.py --check    # what `make test` runs

The first and the last fail where a kernel spills more than four registers, unless it is for wide heads in float32,
takes more shared memory than the device has, or has slow products without a reason (``SLOW``). On two idle cores the
first takes half an hour. The last reads kernels.json if that was measured with these very sources; otherwise it
compiles the hardest configurations.

kernels.json holds the rows of several versions of triton, since torch brings one along. The first command replaces
those of the version that is installed. For another version, install that into a folder of its own; the hardest
configurations are enough there:

    python -m pip install --no-deps --target /tmp/triton triton==3.6.0
    PYTHONPATH=/tmp/triton python lab/benchmarks/kernel_resources.py --hardest
"""

import argparse
import contextlib
import hashlib
import importlib.util
import io
import itertools
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("triton") is None:
    print(f"Triton, which is made for Linux, is not installed on this {platform.system()}: nothing to compile.")
    sys.exit(0 if sys.argv[1:] == ["--check"] else 1)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from diff_lab.results_files import write_json
from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.packed import pack, packed_views
from diff_transformer.ops.triton.kernel_arguments import MEASURED_BLOCKS, are_wide, problem_of
from diff_transformer.ops.triton.launch import Launch, plan_backward, plan_decode, plan_forward
from diff_transformer.utils.files import read_json
from page_sections import replace_sections

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "lab" / "benchmarks" / "kernels.json", ROOT / "docs" / "kernels.md"
KERNELS = ROOT / "src" / "diff_transformer" / "ops" / "triton"
# Bytes of shared memory that a program may have, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Files beside the kernels that change none of them.
COMPILE_NOTHING = ("gpu_check.py", "triton_backend.py")
# Bytes that a thread may spill, four registers: which kernels spill 8 or 16 changes with every change of the sources.
NEGLIGIBLE = 16
# What makes products in half precision slow on Hopper, and the kernels that have it for a reason: what ptxas warns of
# (C7515: products of a warpgroup wait for each other), and products of fewer rows than a warpgroup takes.
SLOW = {
    "C7515": {
        "forward": "blocks of 64 × 32, of which ptxas does not warn, took 1.13 of the time on an H200",
        **dict.fromkeys(("keys", "keys and values"), "under a full mask: so are all others that spill nothing"),
    },
    "mma.sync": {
        "decode": "a tile has 16 rows, and reading the cache takes the time",
        "chunk": "the tile of shared noise maps has a fraction of the other's rows; 64 of wide heads in int8 spill",
        "queries": "of wide heads under a mask: 64 rows spill",
    },
}


class Resources(NamedTuple):
    """Registers of a thread, bytes it spills to memory, bytes of shared memory of a program, and keys of ``SLOW``."""

    registers: int
    spilled: int
    shared: int
    slow: list[str]


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
    ratio: int = 1  # signal heads to a noise map
    tf32: bool = False  # how float32 is multiplied
    has_signal: bool = False  # a weight of the first map, beside λ
    in_eight_bits: bool = False  # keys and values of a cache: it is decoded alone

    @property
    def name(self) -> str:
        """In words, for tables."""
        parts = ["tf32" if self.tf32 else str(self.dtype).removeprefix("torch."), f"d {self.d}, dv {self.dv}"]
        parts += [f"{8 // self.key_heads} heads to a key head"] if self.key_heads < 8 else []
        parts += ["shared keys"] if self.key_maps == 1 else []
        parts += [f"{self.ratio} to a noise map"] if self.ratio > 1 else []
        parts += ["causal"] if self.is_causal else []
        parts += ["window"] if self.window else []
        parts += ["documents"] if self.has_documents else []
        parts += [f"{self.mask} mask"] if self.mask else []
        parts += [f"length {self.length}"] if self.length % 16 else []
        parts += ["two weights"] if self.has_signal else []
        parts += ["in eight bits"] if self.in_eight_bits else []
        return ", ".join(parts)


def in_eight_bits(d: int) -> tuple[Configuration, ...]:
    return (
        Configuration(d, 2 * d, in_eight_bits=True),
        Configuration(d, d, key_heads=2, key_maps=1, has_norm=False, in_eight_bits=True),
        Configuration(d, 2 * d, window=512, mask="padding", in_eight_bits=True),
        Configuration(d, 2 * d, is_causal=False, mask="full", length=4095, in_eight_bits=True),
        Configuration(d, 2 * d, key_heads=2, ratio=4, is_causal=False, mask="full", length=4095, in_eight_bits=True),
        Configuration(d, 2 * d, torch.float32, in_eight_bits=True),
    )


CONFIGURATIONS = tuple(
    configuration
    for d, dv in ((64, 128), (128, 256))
    for configuration in (
        Configuration(d, dv),
        Configuration(d, d, key_heads=2, key_maps=1, has_norm=False),  # DIFF V2
        Configuration(d, dv, window=512, has_documents=True),
        Configuration(d, dv, window=512, has_documents=True, mask="padding"),
        Configuration(d, dv, mask="padding"),
        Configuration(d, dv, mask="full"),
        Configuration(d, dv, is_causal=False, mask="full", length=4095),
        Configuration(d, d, is_causal=False, mask="full", length=4095, key_heads=2, key_maps=1, has_norm=False),
        Configuration(d, dv, torch.float32),
        Configuration(d, dv, torch.float32, tf32=True),
        Configuration(d, dv, key_heads=2, ratio=4),
        Configuration(d, dv, key_heads=2, ratio=4, window=512, has_documents=True, mask="padding"),
        Configuration(d, dv, key_heads=2, ratio=4, is_causal=False, mask="full", length=4095),
        Configuration(d, dv, has_signal=True),
        Configuration(d, dv, window=512, has_documents=True, has_signal=True),
        Configuration(d, dv, is_causal=False, mask="full", length=4095, has_signal=True),
        Configuration(d, dv, key_heads=2, ratio=4, is_causal=False, mask="full", length=4095, has_signal=True),
        Configuration(d, dv, torch.float32, has_signal=True),
        Configuration(d, dv, torch.float32, tf32=True, has_signal=True),
        *in_eight_bits(d),
    )
)

# All kinds of edges, and a mask whose rows are not aligned. (How many heads share a key head makes no other kernel.)
HARDEST = tuple(
    configuration
    for d, dv in ((64, 128), (128, 256))
    for configuration in (
        Configuration(d, dv),
        Configuration(d, dv, window=512, has_documents=True, mask="padding"),
        Configuration(d, dv, is_causal=False, mask="full", length=4095),
        Configuration(d, d, is_causal=False, mask="full", length=4095, key_heads=2, key_maps=1, has_norm=False),
        Configuration(d, dv, key_heads=2, ratio=4, is_causal=False, mask="full", length=4095),
        Configuration(d, dv, has_signal=True),
        Configuration(d, dv, is_causal=False, mask="full", length=4095, has_signal=True),
        *in_eight_bits(d),
    )
)


_KNOWN: dict[tuple[str, int, str], Resources] = {}  # by what a process has compiled


def launches(configuration: Configuration, capability: int) -> Iterator[tuple[str, Launch]]:
    """Every launch of a request's forward with and without gradients, backward and decoding, with its name."""
    c, batch, heads, n = configuration, 2, 8, configuration.length
    torch.backends.cuda.matmul.fp32_precision = "tf32" if c.tf32 else "ieee"

    def empty(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def plan(queries: int, documents: bool) -> Any:
        q = empty(batch, queries, heads // c.ratio, c.ratio + 1, c.d).permute(0, 2, 3, 1, 4)
        k = empty(batch, n, c.key_heads, c.key_maps, c.d).permute(0, 2, 3, 1, 4)
        v = empty(batch, n, c.key_heads, c.dv).transpose(1, 2)
        if c.in_eight_bits:
            k, v = packed_views(pack(k.transpose(2, 3).flatten(-2)), pack(v), c.d)
        rows = {None: None, "padding": 1, "full": queries}[c.mask]
        mask = None if rows is None else empty(batch, 1, rows, n, dtype=torch.bool)
        bounds = empty(2, n, dtype=torch.int32) if documents else None
        lam = empty(batch, heads, queries, dtype=torch.float32)
        signal = empty(batch, heads, queries, dtype=torch.float32) if c.has_signal else None
        return problem_of(Request(q, k, v, lam, mask, c.is_causal, c.d**-0.5, c.window, bounds, signal), capability)

    norm = Norm(empty(c.dv, dtype=torch.float32), 1e-5, 0.8) if c.has_norm else None
    problem = plan(n, c.has_documents)
    of_maps = ("",) if c.ratio == 1 else (", noise maps", ", signal heads")  # a launch each, in this order
    by_keys = ("keys", "values") if are_wide(c.d, c.dv) else ("keys and values",)

    def named(*kernels: str) -> list[str]:
        return [kernel + of_map for of_map in of_maps for kernel in kernels]

    if not c.in_eight_bits:
        yield from zip(named("forward"), plan_forward(problem, norm, save=False)[0], strict=True)
        saving, out, saved = plan_forward(problem, norm, save=True)
        yield from zip(named("forward, for gradients"), saving, strict=True)
        assert saved is not None
        names = ["rows", *named(*by_keys), *named("queries")]
        yield from zip(names, plan_backward(torch.empty_like(out), problem, norm, saved)[0], strict=True)
    if not c.has_documents:
        yield from zip(("decode", "combine"), plan_decode(plan(1, False), norm, 264, c.has_signal)[0], strict=True)
        if c.dtype.itemsize == 2:
            queries = problem.blocks("chunk").rows * c.key_heads // heads
            yield "chunk", plan_decode(plan(queries, False), norm, 264)[0][-2]


def source_of(launch: Launch) -> ASTSource:
    """The launch's kernel, specialised as triton does it at run time."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        is_special = not parameter.do_not_specialize
        signature[name] = "constexpr" if parameter.is_constexpr else mangle_type(value, specialize=is_special)
        if signature[name] == "constexpr":
            constants[name] = value
            continue
        is_aligned = isinstance(value, Tensor) and not parameter.do_not_specialize_on_alignment
        if is_aligned or (is_special and isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def resources(launch: Launch, capability: int) -> Resources:
    """Compile a launch for a compute capability (90 for 9.0) and read what it takes from what ptxas says."""
    source = source_of(launch)
    kernel = (source.hash(), capability, str(launch.options))
    if kernel in _KNOWN:  # of another configuration
        return _KNOWN[kernel]
    log, knobs = io.StringIO(), triton.knobs
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=launch.options)
    said = log.getvalue()
    registers, spilled = (int(re.findall(rf"(\d+) {of}", said)[0]) for of in ("registers", "bytes stack frame"))
    slow = set(re.findall(r"\((C\d+)\) Potential Performance Loss", said))
    if capability == 90 and "mma.sync" in compiled.asm["ptx"]:
        slow.add("mma.sync")
    return _KNOWN.setdefault(kernel, Resources(registers, spilled, compiled.metadata.shared, sorted(slow)))


def measure(job: tuple[int, Configuration]) -> list[dict[str, Any]]:
    """The rows of one configuration on one capability."""
    capability, configuration = job
    rows = []
    for name, launch in launches(configuration, capability):
        measured = resources(launch, capability)
        sizes = {key.lower(): launch.arguments[key] for key in ("QUERIES", "KEYS", "ROWS") if key in launch.arguments}
        rows.append(
            {
                "capability": capability,
                "configuration": configuration.name,
                "kernel": name,
                **sizes,
                "num_warps": launch.num_warps,
                "num_stages": launch.num_stages,
                **measured._asdict(),
                "slow": measured.slow if configuration.dtype.itemsize == 2 else [],
                "may_spill": "float32" in configuration.name and are_wide(configuration.d, configuration.dv),
            }
        )
    return rows


def capability_table(rows: list[dict[str, Any]], capability: int) -> str:
    """Markdown: a line for each kernel and configuration on one capability."""
    header = (
        "configuration",
        "kernel",
        "queries × keys",
        "warps",
        "stages",
        "registers",
        "spilled, bytes",
        "shared, KiB",
    )
    lines = []
    for row in rows:
        if row["capability"] == capability:
            size = f"{row.get('queries', row.get('rows', '–'))} × {row.get('keys', '–')}"
            numbers = (row["num_warps"], row["num_stages"], row["registers"], row["spilled"])
            cells = (row["configuration"], row["kernel"], size, *numbers, f"{row['shared'] / 1024:.0f}")
            lines.append(tuple(map(str, cells)))
    shared = f"{SHARED_MEMORY[capability] // 1024} KiB of shared memory a block"
    return f"Compute capability {capability / 10}, {shared}:\n\n{markdown_table(header, lines)}"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: for each kernel and capability the largest registers, spills and shared memory of any configuration."""
    capabilities = sorted({row["capability"] for row in rows})
    lines = []
    for may_spill, suffix in ((False, ""), (True, ", wide heads in float32")):
        for kernel in dict.fromkeys(row["kernel"] for row in rows):
            cells = []
            for capability in capabilities:
                key = (kernel, capability, may_spill)
                found = [row for row in rows if (row["kernel"], row["capability"], row["may_spill"]) == key]
                largest = [max((row[name] for row in found), default=0) for name in Resources._fields[:3]]
                cells.append(f"{largest[0]}, {largest[1]}, {largest[2] / 1024:.0f}" if found else "–")
            if any(cell != "–" for cell in cells):
                lines.append((f"{kernel}{suffix}", *cells))
    header = ("kernel", *(f"capability {capability / 10}" for capability in capabilities))
    limits = ", ".join(f"{capability / 10}: {SHARED_MEMORY[capability] // 1024}" for capability in capabilities)
    return (
        f"{markdown_table(header, lines)}\n\nEach cell: registers of a thread, bytes it spills, and KiB of shared "
        f"memory of a block, each the largest of all configurations ({len(rows)} compilations). Limits, KiB: {limits}."
    )


def fingerprint(version: str) -> str:
    """A hash of all that the rows of a version of triton depend on: kernels, block sizes, launches, configurations."""
    compiled = sorted(path for path in KERNELS.glob("*.py") if path.name not in COMPILE_NOTHING)
    paths = [*compiled, Path(__file__), *([MEASURED_BLOCKS] if MEASURED_BLOCKS.is_file() else [])]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    return hashlib.sha256((version + repr(CONFIGURATIONS) + sources).encode()).hexdigest()


def compile_all(capabilities: Iterable[int], configurations: Iterable[Configuration]) -> list[dict[str, Any]]:
    """The rows of all configurations on all capabilities, compiled in two processes."""
    with ProcessPoolExecutor(2) as pool:
        return [row for part in pool.map(measure, itertools.product(capabilities, configurations)) for row in part]


def has_reason(kernel: str, why: str) -> bool:
    """Whether a kernel's slow products are among those with a reason."""
    return kernel.split(",")[0] in SLOW.get(why, {})


def require_fitting(rows: list[dict[str, Any]]) -> None:
    """End the program with the rows that no device should run, if there are any."""
    wrong = [row for row in rows if row["shared"] > SHARED_MEMORY[row["capability"]]]
    wrong += [row for row in rows if row["spilled"] > NEGLIGIBLE and not row["may_spill"]]
    wrong += [row for row in rows for why in row.get("slow", ()) if not has_reason(row["kernel"], why)]
    if wrong:
        what = (
            "These configurations spill too much, take too much shared memory, or have slow products without a reason:"
        )
        sys.exit("\n".join((what, *map(str, wrong))))


def known_versions() -> dict[str, Any]:
    """What has been measured, by version of triton."""
    return read_json(RESULTS)["triton"] if RESULTS.is_file() else {}


def check() -> None:
    """Look at the measured rows, or where the sources have changed since at new ones of the hardest configurations."""
    versions = known_versions()
    known = versions.pop(triton.__version__, {})
    if known.get("sources") == fingerprint(triton.__version__):
        rows, origin = known["rows"], f"as {RESULTS.name} holds them"
    else:
        rows, origin = compile_all((80, 90, 100), HARDEST), f"compiled now, as {RESULTS.name} holds other sources"
    require_fitting(rows)
    print(f"kernel resources, triton {triton.__version__}: {len(rows)} compilations within limits, {origin}")
    for version, other in versions.items():
        is_current = other["sources"] == fingerprint(version)
        require_fitting(other["rows"])
        print(f"triton {version}: within limits{'' if is_current else ', but measured with other sources'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--hardest", action="store_true", help="compile the hardest configurations alone")
    choice.add_argument("--check", action="store_true", help="check the limits, and write nothing")
    choice.add_argument(
        "--tables", action="store_true", help="print the tables of the measured rows, and compile nothing"
    )
    arguments = parser.parse_args()
    if arguments.check:
        check()
        return
    if arguments.tables:
        for version, known in known_versions().items():
            tables = (capability_table(known["rows"], capability) for capability in SHARED_MEMORY)
            print("\n\n".join((f"Triton {version}.", *tables)))
        return
    rows = compile_all((80, 90, 100), HARDEST) if arguments.hardest else compile_all(SHARED_MEMORY, CONFIGURATIONS)
    environment = {"torch": torch.__version__, "python": platform.python_version()}
    measured = known_versions()
    measured[triton.__version__] = {"versions": environment, "sources": fingerprint(triton.__version__), "rows": rows}
    command = f"python lab/benchmarks/{Path(__file__).name}"
    write_json(RESULTS, {"command": command, "triton": dict(sorted(measured.items()))}, indent=1)
    texts = [f"{summary(known['rows'])} `{command}`, triton {version}." for version, known in measured.items()]
    replace_sections(PAGE, {"resources": "\n\n".join(texts)})
    require_fitting(rows)


if __name__ == "__main__":
    main()
