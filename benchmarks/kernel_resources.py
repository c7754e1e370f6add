"""Compile the Triton kernels ahead of time: registers, spills and shared memory of each configuration. Needs no GPU.

    python benchmarks/kernel_resources.py           # all of them, into benchmarks/kernels.json and docs/kernels.md
    python benchmarks/kernel_resources.py --check   # the hardest, printed: what `make test` does

Both fail where a kernel for 16 bits spills, or anything takes more shared memory than there is. On two cores the first
takes four minutes, the second one and a half.
"""

import json
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from diff_transformer.ops.triton.resources import SHARED_MEMORY, Configuration, launches, resources

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "kernels.json", ROOT / "docs" / "kernels.md"
CONFIGURATIONS = tuple(
    configuration
    for d, dv in ((64, 128), (128, 256))
    for configuration in (
        Configuration(d, dv),
        Configuration(d, dv, key_heads=2),
        Configuration(d, d, key_heads=2, key_maps=1, has_norm=False),  # DIFF V2
        Configuration(d, dv, window=512, has_documents=True),
        Configuration(d, dv, mask="padding"),
        Configuration(d, dv, mask="full"),
        Configuration(d, dv, is_causal=False, mask="full", length=4095),
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
    )
)


def measure(job: tuple[int, Configuration]) -> list[dict[str, Any]]:
    """The rows of one configuration on one capability."""
    capability, configuration = job
    rows = []
    for name, launch in launches(configuration, capability):
        found = resources(launch, capability)
        sizes = {key.lower(): launch.arguments[key] for key in ("QUERIES", "KEYS", "ROWS") if key in launch.arguments}
        rows.append(
            {
                "capability": capability,
                "configuration": configuration.name,
                "kernel": name,
                **sizes,
                "num_warps": launch.num_warps,
                "num_stages": launch.num_stages,
                **found._asdict(),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], capability: int) -> str:
    """Markdown: one line a kernel and configuration."""
    lines = [
        f"Compute capability {capability / 10}, {SHARED_MEMORY[capability] // 1024} KiB of shared memory a block:",
        "",
        "| configuration | kernel | queries × keys | warps | stages | registers | spilled, bytes | shared, KiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["capability"] != capability:
            continue
        size = f"{row.get('queries', row.get('rows', '–'))} × {row.get('keys', '–')}"
        cells = (row["configuration"], row["kernel"], size, row["num_warps"], row["num_stages"], row["registers"])
        lines.append(f"| {' | '.join(map(str, cells))} | {row['spilled']} | {row['shared'] / 1024:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Compile; print or write."""
    check = sys.argv[1:] == ["--check"]
    capabilities = (80, 90, 100) if check else tuple(SHARED_MEMORY)
    jobs = [(capability, each) for capability in capabilities for each in (HARDEST if check else CONFIGURATIONS)]
    with ProcessPoolExecutor(2) as pool:
        rows = [row for part in pool.map(measure, jobs) for row in part]
    note = f"`python benchmarks/{Path(__file__).name}`, triton {triton.__version__}."
    tables = "\n\n".join([*(table(rows, capability) for capability in capabilities), note])
    if check:
        print(tables)
    else:
        versions = {"triton": triton.__version__, "torch": torch.__version__, "python": platform.python_version()}
        document = {"command": note.split("`")[1], "versions": versions, "rows": rows}
        RESULTS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        before, rest = PAGE.read_text(encoding="utf-8").split("<!-- resources -->")
        after = rest.split("<!-- /resources -->")[1]
        PAGE.write_text(f"{before}<!-- resources -->\n{tables}\n<!-- /resources -->{after}", encoding="utf-8")
    wrong = [row for row in rows if row["shared"] > SHARED_MEMORY[row["capability"]]]
    wrong += [row for row in rows if row["spilled"] and "float32" not in row["configuration"]]
    if wrong:
        sys.exit("These configurations spill, or take too much shared memory:\n" + "\n".join(map(str, wrong)))


if __name__ == "__main__":
    main()
