"""Compiles the Triton kernels ahead of time and reports registers, spills and shared memory. Needs no GPU.

    python benchmarks/kernel_resources.py            # compiles all: benchmarks/kernels.json, docs/kernels.md
    python benchmarks/kernel_resources.py --tables   # prints what kernels.json holds, a line a compilation
    python benchmarks/kernel_resources.py --check    # what `make test` runs

The first and the last fail where a kernel spills registers, unless it is for wide heads in float32, or takes more
shared memory than the device has. On two cores the first takes four minutes. The last reads kernels.json if that was
measured with these very sources; otherwise it compiles the hardest configurations, which takes up to a minute.
"""

import argparse
import hashlib
import importlib.util
import itertools
import platform
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

if importlib.util.find_spec("triton") is None:
    print(f"Triton, which is made for Linux, is not installed on this {platform.system()}: nothing to compile.")
    sys.exit(0 if sys.argv[1:] == ["--check"] else 1)

import torch
import triton

from diff_transformer.lab.bench.bench_pages import replace_sections
from diff_transformer.lab.results_files import write_json
from diff_transformer.ops.triton.kernel_arguments import are_wide
from diff_transformer.ops.triton.resources import SHARED_MEMORY, Configuration, Resources, launches, resources
from diff_transformer.storage.files import read_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "kernels.json", ROOT / "docs" / "kernels.md"
KERNELS = ROOT / "src" / "diff_transformer" / "ops" / "triton"
CONFIGURATIONS = tuple(
    configuration
    for d, dv in ((64, 128), (128, 256))
    for configuration in (
        Configuration(d, dv),
        Configuration(d, dv, key_heads=2),
        Configuration(d, d, key_heads=2, key_maps=1, has_norm=False),  # DIFF V2
        Configuration(d, dv, window=512, has_documents=True),
        Configuration(d, dv, window=512, has_documents=True, mask="padding"),
        Configuration(d, dv, mask="padding"),
        Configuration(d, dv, mask="full"),
        Configuration(d, dv, is_causal=False, mask="full", length=4095),
        Configuration(d, d, is_causal=False, mask="full", length=4095, key_heads=2, key_maps=1, has_norm=False),
        Configuration(d, dv, torch.float32),
    )
)

# Grouped heads, all kinds of edges, and a mask whose rows are not aligned.
HARDEST = tuple(
    configuration
    for d, dv in ((64, 128), (128, 256))
    for configuration in (
        Configuration(d, dv, key_heads=2),
        Configuration(d, dv, window=512, has_documents=True, mask="padding"),
        Configuration(d, dv, is_causal=False, mask="full", length=4095),
        Configuration(d, d, is_causal=False, mask="full", length=4095, key_heads=2, key_maps=1, has_norm=False),
    )
)


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
                "may_spill": configuration.dtype == torch.float32 and are_wide(configuration.d, configuration.dv),
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
                largest = [max((row[name] for row in found), default=0) for name in Resources._fields]
                cells.append(f"{largest[0]}, {largest[1]}, {largest[2] / 1024:.0f}" if found else "–")
            if any(cell != "–" for cell in cells):
                lines.append((f"{kernel}{suffix}", *cells))
    header = ("kernel", *(f"capability {capability / 10}" for capability in capabilities))
    limits = ", ".join(f"{capability / 10}: {SHARED_MEMORY[capability] // 1024}" for capability in capabilities)
    return (
        f"{markdown_table(header, lines)}\n\nEach cell: registers of a thread, bytes it spills, and KiB of shared "
        f"memory of a block, each the largest of all configurations ({len(rows)} compilations). Limits, KiB: {limits}."
    )


def fingerprint() -> str:
    """A hash of all that the rows depend on: kernels, block sizes, launches, the configurations and the compiler."""
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.py")))
    return hashlib.sha256((triton.__version__ + repr(CONFIGURATIONS) + sources).encode()).hexdigest()


def compile_all(capabilities: Iterable[int], configurations: Iterable[Configuration]) -> list[dict[str, Any]]:
    """The rows of all configurations on all capabilities, compiled in two processes."""
    with ProcessPoolExecutor(2) as pool:
        return [row for part in pool.map(measure, itertools.product(capabilities, configurations)) for row in part]


def require_fitting(rows: list[dict[str, Any]]) -> None:
    """End the program with the rows that no device should run, if there are any."""
    wrong = [row for row in rows if row["shared"] > SHARED_MEMORY[row["capability"]]]
    wrong += [row for row in rows if row["spilled"] and not row["may_spill"]]
    if wrong:
        sys.exit("These configurations spill, or take too much shared memory:\n" + "\n".join(map(str, wrong)))


def check() -> None:
    """Look at the measured rows, or where the sources have changed since at new ones of the hardest configurations."""
    known = read_json(RESULTS)
    if known.get("sources") == fingerprint():
        rows, origin = known["rows"], f"as {RESULTS.name} holds them"
    else:
        rows, origin = compile_all((80, 90, 100), HARDEST), f"compiled now, since {RESULTS.name} is of other sources"
    require_fitting(rows)
    print(f"kernel resources: {len(rows)} compilations within limits, {origin}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true", help="check the limits, and write nothing")
    choice.add_argument(
        "--tables", action="store_true", help="print the tables of the measured rows, and compile nothing"
    )
    arguments = parser.parse_args()
    if arguments.check:
        check()
        return
    if arguments.tables:
        rows = read_json(RESULTS)["rows"]
        print("\n\n".join(capability_table(rows, capability) for capability in SHARED_MEMORY))
        return
    rows = compile_all(SHARED_MEMORY, CONFIGURATIONS)
    versions = {"triton": triton.__version__, "torch": torch.__version__, "python": platform.python_version()}
    command = f"python benchmarks/{Path(__file__).name}"
    write_json(RESULTS, {"command": command, "versions": versions, "sources": fingerprint(), "rows": rows}, indent=1)
    replace_sections(PAGE, {"resources": f"{summary(rows)} `{command}`, triton {triton.__version__}."})
    require_fitting(rows)


if __name__ == "__main__":
    main()
