"""Copy measured numbers into README.md and docs/, so that none is typed by hand.

    diff-lab reproduce all --output lab/results/cpu --resume
    diff-lab reproduce language --preset evening --text novels --output lab/results/evening --resume
    diff-lab reproduce language --preset night --text novels --output lab/results/night --resume
    diff-lab reproduce table5 fig8 low_bit fig4 --preset night --text novels --output lab/results/night_models --resume
    rm lab/results/cpu/table5.json lab/results/cpu/fig8.json lab/results/cpu/fig4.json    # of smaller models
    diff-lab report lab/results --output lab/results/RESULTS.md --overwrite
    diff-lab bench operator --output lab/benchmarks --overwrite
    diff-lab bench model --output lab/benchmarks --overwrite
    diff-lab bench operator --output lab/benchmarks/amx --overwrite    # on a processor with AMX
    diff-lab bench model --output lab/benchmarks/amx --overwrite
    OMP_NUM_THREADS=1 diff-lab bench model --pass decode --length 512 --length 2048 --rounds 7 \\
        --output lab/benchmarks/decoding --overwrite    # with ctranslate2 installed
    make bench-anchors BENCH="operator --output lab/benchmarks/anchors --overwrite"    # on a processor with AMX
    python lab/benchmarks/gpu_record.py    # on a machine with a GPU
    python lab/benchmarks/fill_readme.py

Fills the places between `<!-- name -->` and `<!-- /name -->` from what lab/results/ and lab/benchmarks/ hold, and the
folders of the trained models that come with the package (lab/benchmarks/pack_weights.py).
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from concept_tables import attention_types, known, measured_variants
from diff_lab.bench.bench_pages import (
    base_of,
    grouped_table,
    page_part,
    ratio_table,
    write_page,
)
from diff_lab.bench.model_bench import COMPILED, CTRANSLATE2, DIFF, LLAMA, LLAMA_COMPILED
from diff_lab.bench.operator_candidates import AUTO, BASELINE, BASELINE_CUDNN, BASELINE_FLASH
from diff_lab.experiments.request import as_defined
from diff_lab.record import CardRecord
from diff_lab.report.findings import ExperimentResults, findings, read_experiments
from diff_lab.report.tables import rows_of
from diff_lab.report.wording import (
    LEVELS,
    format_difference,
    format_number,
    level_cells,
    levels_of,
    measure_label,
    variant_label,
    variants_of,
    verdict_text,
)
from diff_lab.results_files import read_record, read_results, short_commit
from diff_transformer.shipped_models import CARD_RECORD, LANGUAGE_MODEL, pretrained, pretrained_names
from diff_transformer.utils.files import files_in, read_json
from page_sections import replace_sections

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "lab" / "results"
OPERATOR, MODEL = HERE / "operator-cpu.json", HERE / "model-cpu.json"
AMX_OPERATOR, AMX_MODEL = HERE / "amx" / OPERATOR.name, HERE / "amx" / MODEL.name
DECODING, ANCHORS = HERE / "decoding" / MODEL.name, HERE / "anchors" / OPERATOR.name
CUDA_OPERATOR, CUDA_MODEL = HERE / "operator-cuda.json", HERE / "model-cuda.json"
GPU_RECORD = HERE / "gpu-record.json"
README, BACKENDS_PAGE = ROOT / "README.md", ROOT / "docs" / "backends.md"
START_PAGE, COST_PAGE = ROOT / "docs" / "index.md", ROOT / "docs" / "concepts" / "cost.md"
CHOICE_PAGE = ROOT / "docs" / "concepts" / "which-one.md"
KERNELS_PAGE, PAPER_PAGE = ROOT / "docs" / "kernels.md", ROOT / "docs" / "concepts" / "paper.md"
MODELS_PAGE = ROOT / "docs" / "trained-models.md"


# Rows of the table of costs, of the operator's and of the whole model's results: a label, and which ratios a row holds.
OPERATOR_ROWS = (
    ("attention, forward, {} tokens", "auto", "forward", 2048),
    ("attention, forward and backward, {} tokens", "auto", "forward + backward", 2048),
)
MODEL_ROWS = (
    ("34M parameters, training step, {} tokens", "diff", "training step", 1024),
    ("34M parameters, decoding one token, {} keys", "diff", "decode", 2048),
)
DTYPES = ("float32", "bfloat16")
SHOWN = (512, 2048, 8192)  # tokens, of all lengths that a processor was measured with
OTHER = "DiffLlama"
# Ways to decode a model of DIFF's size, as columns of the table of them: DIFF's own has a row, as it is and compiled.
DECODERS = {
    "this package's Transformer": (BASELINE, None),
    "transformers' Llama": (LLAMA, LLAMA_COMPILED),
    "CTranslate2's": (CTRANSLATE2, CTRANSLATE2),
}


def measured_experiments() -> list[ExperimentResults]:
    """All results, of every preset, each with what the definition of its experiment says of it, in a report's order."""
    return read_experiments([RESULTS], as_defined)


def results_table(experiments: Sequence[ExperimentResults]) -> str:
    """One row for each experiment that compares two variants."""
    lines = [
        "| | compared | measure | paper: first, second | here: first, second | chance; floor | difference | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    named = sorted(findings(experiments), key=lambda one: experiments.index(one.results))
    for one in named:
        row = one.row
        paper = "–" if row.paper is None else _pair(row.paper)
        levels = "; ".join(level_cells(row)) if levels_of(row) else "–"
        here = f"{_pair(row.ours)} | {levels} | {format_difference(row)} | {verdict_text(row)}"
        pair = f"{variant_label(row.variant)} − {variant_label(row.against)}"
        lines.append(f"| {one.name} | {pair} | {measure_label(row)} | {paper} | {here} |")
    files = [results.file for results in experiments]
    commits = ", ".join(dict.fromkeys(short_commit(file.commit) for file in files))
    devices = ", ".join(dict.fromkeys(file.device for file in files))
    versions = ", ".join(dict.fromkeys(file.versions["torch"] for file in files))
    note = (
        f"One row per experiment, the comparison that its definition names. {LEVELS} Measured on {devices}; some "
        f"runs were trained on GPUs, as their pages say. torch {versions}, commit {commits}, by the commands there."
    )
    return "\n".join(lines) + "\n\n" + note


def _pair(values: tuple[float, float]) -> str:
    return ", ".join(format_number(value) for value in values)


def costs(
    processors: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], anchored: Sequence[Mapping[str, Any] | None]
) -> str:
    """Format the times relative to the Transformer's, and those of transformers' DiffLlama beside them.

    Results of a checkout with changes are left out: nobody could repeat them.

    Args:
        processors: the results of `bench operator` and `bench model` on each processor.
        anchored: those of `make bench-anchors` on each, or None.
    """
    # Names without threads and without what is said of every processor.
    names = [str(operator["device"]).partition(",")[0].replace("(R)", "") for operator, _ in processors]
    devices = [name.removesuffix(" Processor") for name in names]
    lines = [f"| | {' | '.join(devices)} | transformers' {OTHER} |", "|---|" + "---|" * (len(devices) + 1)]
    clean = [[one for one in pair if not (one["commit"] or "-dirty").endswith("-dirty")] for pair in processors]
    for which, rows in enumerate((OPERATOR_ROWS, MODEL_ROWS)):
        documents = [pair[which] if pair[which] in kept else None for pair, kept in zip(processors, clean, strict=True)]
        for label, candidate, pass_, length in rows:
            ours = [_cost(document, candidate, pass_, length) for document in documents]
            others = [
                _ratio(document, OTHER, pass_, length, dtype)
                for document in documents
                if document is not None
                for dtype in DTYPES
            ]
            span = f"{min(others):.2f}–{max(others):.2f}"
            lines.append(f"| {label.format(f'{length:,}')} | {' | '.join(ours)} | {span} |")
        for length in SHOWN if which == 0 else ():
            ours = [_over_fastest(document, length) for document in anchored]
            label = f"attention, forward, {length:,} tokens, over the fastest of torch's, vLLM's and zentorch's"
            lines.append(f"| {label} | {' | '.join(ours)} | – |")
    named = [one["commit"] for one in (*(document for kept in clean for document in kept), *anchored) if one]
    commits = ", ".join(dict.fromkeys(map(short_commit, named)))
    missing = " –: not measured, or of a checkout with changes alone."
    note = (
        f"{' / '.join(DTYPES)}, lower is better. Two threads, batch 1, heads of 64; on the EPYC torch's attention "
        "gains little from bfloat16. `diff-lab bench operator` and `bench model`, `make bench-anchors`, commits "
        f"{commits}; [more of them](docs/backends.md#what-was-measured).{missing}"
    )
    return "\n".join(lines) + "\n\n" + note


def _over_fastest(document: Mapping[str, Any] | None, length: int) -> str:
    """Format the operator's forward time over the least of the Transformer's, by any library that was there."""
    cells = []
    for dtype in DTYPES:
        ratios = {
            row["candidate"]: row["ratio"]
            for row in (document["rows"] if document else ())
            if (row["pass"], row["dtype"], row["shape"]["keys"]) == ("forward", dtype, length) and row["ratio"]
        }
        others = [ratio for name, ratio in ratios.items() if name.startswith(f"{BASELINE} ")]
        if not others:
            return "–"
        cells.append(f"{ratios[AUTO] / min(1.0, *others):.2f}")
    return " / ".join(cells)


def _cost(document: Mapping[str, Any] | None, candidate: str, pass_: str, length: int) -> str:
    if document is None:
        return "–"
    return " / ".join(f"{_ratio(document, candidate, pass_, length, dtype):.2f}" for dtype in DTYPES)


def _ratio(document: Mapping[str, Any], candidate: str, pass_: str, length: int, dtype: str) -> float:
    found = [
        row["ratio"]
        for row in document["rows"]
        if (row["candidate"], row["pass"], row["dtype"], row["against"]) == (candidate, pass_, dtype, "softmax")
        and (row["shape"]["keys"] if "keys" in row["shape"] else row["shape"]["length"]) == length
        and row["shape"]["batch"] == 1
    ]
    (ratio,) = found
    return float(ratio)


def decoding(document: Mapping[str, Any]) -> str:
    """DIFF's time for a token relative to each of the ways to decode another model of its size."""
    cases: dict[tuple[str, int, str], dict[str, Mapping[str, Any]]] = {}
    for row in document["rows"]:
        if row["candidate"] in (DIFF, COMPILED):
            cases.setdefault((row["dtype"], row["shape"]["length"], row["candidate"]), {})[row["against"]] = row
    lines = [f"| DIFF relative to | {' | '.join(DECODERS)} | DIFF, ms |", "|---|---|" + "---|" * len(DECODERS)]
    for (dtype, length, candidate), rows in cases.items():
        compiled = candidate == COMPILED
        against = (names[compiled] for names in DECODERS.values())
        cells = (f"{rows[name]['ratio']:.2f}" if name in rows else "–" for name in against)
        label = f"{dtype}, {length:,} keys{', compiled' if compiled else ''}"
        lines.append(f"| {label} | {' | '.join(cells)} | {rows[BASELINE]['milliseconds']:.1f} |")
    note = (
        "compiled: DIFF and the Llama each in one graph of torch.compile, with a static cache. int8: weights in eight "
        "bits, by this package; in CTranslate2 activations as well, by its own means. "
    )
    return "\n".join(lines) + f"\n\n{note}{' '.join(document['notes'])} {page_part('provenance', document)}"


def processor_table(document: dict[str, Any], anchors: bool = False) -> str:
    """The operator's times on a processor at a few lengths; with `anchors`, those of `make bench-anchors` alone."""
    rows = [row for row in document["rows"] if row["shape"]["batch"] == 1 and row["shape"]["keys"] in SHOWN]
    if anchors:
        others = (BASELINE, AUTO)
        rows = [row for row in rows if row["candidate"].startswith(others) and row["pass"] in ("forward", "decode")]
    return speed_table({**document, "rows": rows})


def speed_table(document: dict[str, Any]) -> str:
    """The operator's times."""
    note = (
        f"Ratios to the time of `{base_of(document)}`, the Transformer's attention, in the same round, median of the "
        "rounds; causal; heads are the Transformer's. "
    )
    return f"{ratio_table(document)}\n\n{note}{page_part('provenance', document)}"


def whole_model_table(document: dict[str, Any]) -> str:
    """The whole model's times, and its size."""
    shapes = [row["shape"] for row in document["rows"]]
    hidden, layers, batch = (
        " and ".join(map(str, dict.fromkeys(shape[name] for shape in shapes))) for name in ("hidden", "layers", "batch")
    )
    note = (
        f"Ratios to the Transformer's time in the same round; a / b is relative to b. Hidden size {hidden}, "
        f"{layers} layers, batch {batch}. "
    )
    return f"{ratio_table(document)}\n\n{note}{page_part('provenance', document)}"


def cuda_summary(operator: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Times of "auto" relative to the Transformer by each of its kernels: of each pass the longest of 4,096 at most."""
    rows = [row for row in operator["rows"] if row["dtype"] == "bfloat16" and row["shape"]["keys"] <= 4096]
    shapes: dict[tuple[str, int], dict[str, int]] = {}
    for row in rows:
        case, shape = (row["pass"], row["shape"]["width"]), row["shape"]
        shapes[case] = max(shapes.get(case, shape), shape, key=lambda one: (one["keys"], -one["batch"]))
    lines = [f"| {operator['device']}, bfloat16 | FlashAttention 2 | cuDNN |", "|---|---|---|"]
    for (pass_, width), shape in shapes.items():
        ratios = {row["candidate"]: row["ratio"] for row in rows if (row["pass"], row["shape"]) == (pass_, shape)}
        own, *others = (ratios.get(name) for name in (AUTO, BASELINE_FLASH, BASELINE_CUDNN))
        cells = (f"{own / other:.2f}" if own and other else "–" for other in others)
        lines.append(f"| attention, {pass_}, d {width}, {shape['keys']:,} tokens | {' | '.join(cells)} |")
    of_model = [row for row in model["rows"] if row["candidate"] == "diff" and row["ratio"] is not None]
    for row in of_model:
        # The baseline there is torch's own choice, which `softmax` in the operator's table shows to be the first.
        lines.append(f"| model, {row['pass']}, {row['shape']['length']:,} tokens | {row['ratio']:.2f} | – |")
    return lines


def cuda_parts(operator: dict[str, Any], model: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """What each page shows of a GPU's results."""
    lines = cuda_summary(operator, model)
    of_training = (line for line in lines[2:] if "backward" in line or "training" in line)
    operator_notes, model_notes = ("\n\n".join(document["notes"]) for document in (operator, model))
    named = {"throughput": "throughput", "decode": "bandwidth", "memory": "memory"}
    return {
        README: {"cuda costs": "\n".join([*lines[:2], *of_training])},
        COST_PAGE: {"cuda model": f"{whole_model_table(model)}\n\n{page_part('tokens', model)}\n\n{model_notes}"},
        BACKENDS_PAGE: {
            "cuda speed": f"{speed_table(operator)}\n\n{operator_notes}",
            "cuda costs": "\n".join(lines),
            **{f"cuda {name}": page_part(part, operator) or "Not measured." for name, part in named.items()},
        },
    }


def gpu_record_table(record: dict[str, Any]) -> str:
    """How each stage of gpu_record.py ended, and what it says of the kernels."""
    lines = ["| stage | outcome | seconds | found |", "|---|---|---|---|"]
    for name, stage in record["stages"].items():
        lines.append(f"| {name} | {stage['status']} | {stage['seconds']:.0f} | {_found(name, stage['found'] or {})} |")
    measured_on = (record["stages"].get("correctness", {}).get("found") or {}).get("environment", {})
    versions = ", ".join(f"{name} {version}" for name, version in measured_on.get("versions", {}).items())
    device, commit = measured_on.get("device", "an unknown device"), short_commit(measured_on.get("commit"))
    stopped = f" Stopped: {record['stopped']}." if "stopped" in record else ""
    note = f"{device}, {versions}, commit {commit}, `python lab/benchmarks/gpu_record.py`."
    return "\n".join(lines) + f"\n\n{note}{stopped}"


def _found(stage: str, found: Mapping[str, Any]) -> str:
    if stage == "correctness":
        errors = [row["error"] for row in found.get("rows", []) if row["error"] is not None]
        return f"{len(errors)} results, the largest error {max(errors, default=math.nan):.2f} of what is allowed"
    if stage == "tests":
        return ", ".join(f"{count} {outcome}" for outcome, count in found.get("outcomes", {}).items()) or "–"
    if stage == "tuning":
        fastest = found.get("fastest", {}).items()
        sizes = "; ".join(f"{kernel}: {' × '.join(map(str, blocks[:2]))}" for kernel, blocks in fastest)
        return f"{sizes or '–'}{'' if found.get('kept') else ' (not kept)'}"
    return f"`lab/benchmarks/{found['document']}`, {found['wrong']} wrong" if "document" in found else "–"


def shipped_models(folder_of_page: Path) -> str:
    """What a page says of the trained models that come with the package."""
    folders = {name: Path(pretrained(name)) for name in pretrained_names()}
    lines = ["| | | measured | MB |", "|---|---|---|---|"]
    for name, folder in folders.items():
        record = read_record(folder / CARD_RECORD, CardRecord)
        overall = [one for one in read_results(folder / "results.json").records if not one.coordinates]
        numbers = "; ".join(" ".join([row.label, *row.texts(variants_of(overall))]) for row in rows_of(overall))
        card = f"[{name}]({os.path.relpath(folder / 'README.md', folder_of_page)})"
        lines.append(f"| {card} | {record.summary} | {numbers} | {_megabytes([folder])} |")
    return f"""Trained models come with the package, {_megabytes(folders.values())} MB together:

```python
import diff_transformer
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = diff_transformer.pretrained("{LANGUAGE_MODEL}")
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

`diff-transformer generate --prompt "It was"` writes with this one; `generate`, `eval` and `export` take these names, \
and `diff-lab eval NAME` measures the numbers again. Each model was trained once, so that they do not tell which kind \
of attention is better.

""" + "\n".join(lines)


def _megabytes(folders: Iterable[Path]) -> str:
    return f"{sum(file.stat().st_size for folder in folders for file in files_in(folder)) / 1e6:.1f}"


def main() -> None:
    documents = OPERATOR, MODEL, AMX_OPERATOR, AMX_MODEL, DECODING, ANCHORS
    operator, model, amx_operator, amx_model, decoded, anchors = map(read_json, documents)
    experiments = measured_experiments()
    pages = {
        README: {
            "known": known(experiments, "lab/results/RESULTS.md"),
            "costs": costs([(operator, model), (amx_operator, amx_model)], [None, anchors]),
            "decoding": decoding(decoded),
        },
        BACKENDS_PAGE: {
            "speed": processor_table(operator),
            "memory": page_part("memory", operator),
            "grouped": grouped_table(operator),
            "amx speed": processor_table(amx_operator),
            "anchors": processor_table(anchors, anchors=True),
        },
        PAPER_PAGE: {"results": results_table(experiments)},
        MODELS_PAGE: {"shipped models": shipped_models(MODELS_PAGE.parent)},
        START_PAGE: {"known": known(experiments, "../lab/results/RESULTS.md")},
        CHOICE_PAGE: {"attention types": attention_types(), "measured variants": measured_variants(experiments)},
        COST_PAGE: {
            "model": whole_model_table(model),
            "amx model": whole_model_table(amx_model),
            "decoding": whole_model_table(decoded),
        },
        KERNELS_PAGE: {"gpu record": gpu_record_table(read_json(GPU_RECORD))},
    }
    for parts_of in (pages, cuda_parts(read_json(CUDA_OPERATOR), read_json(CUDA_MODEL))):
        for path, parts in parts_of.items():
            replace_sections(path, parts)
    for path in (*documents, CUDA_OPERATOR, CUDA_MODEL):
        write_page(path)


if __name__ == "__main__":
    main()
