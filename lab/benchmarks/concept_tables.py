"""Makes what the documentation's pages say of findings and of attention types, from results and descriptions.

`lab/benchmarks/fill_readme.py` writes it into README.md, docs/index.md and docs/concepts/which-one.md.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from diff_lab.measure.document_losses import WHOLE
from diff_lab.record import Comparison
from diff_lab.report.findings import LEVEL, ExperimentResults, corrected, name_in_report
from diff_lab.report.wording import format_difference, format_number, variant_label, verdict_text
from diff_transformer.attention_types import ATTENTION_TYPES, AttentionType
from diff_transformer.model import DiffTransformerConfig

# The layer that types are counted for.
WIDTH, HEADS, HEAD_DIM, NOISE_HEADS = 1024, 16, 64, 4
# The experiments whose losses of several variants stand beside each other.
COMPARED = ("v2", "language")


def known(experiments: Sequence[ExperimentResults], report: str) -> str:
    """Say which comparisons have a small p after a correction for their number, with links into the report.

    Args:
        experiments: all results.
        report: path of the report from the page.
    """
    tested, left = corrected(experiments)
    sizes = [variant["parameters"] for one in experiments for variant in one.variants]
    is_open = all(row.verdict == "still learning" for _, _, row in left)
    undecided = ". In each a model was still learning, so nothing is decided either way" if left and is_open else ""
    return (
        f"Of {tested} [comparisons]({report}) of models with {min(sizes) / 1e6:.2f}M to {max(sizes) / 1e6:.2f}M "
        f"parameters, over paired seeds, {len(left)} have p < {LEVEL} after Holm's correction{undecided}:\n\n"
        + "\n".join(_sentence(one, row, p, name_in_report(one, experiments), report) for p, one, row in left)
    )


def _sentence(results: ExperimentResults, row: Comparison, p: float, name: str, report: str) -> str:
    """The claim of an experiment, whether it holds, and Holm's p."""
    assert results.file.headline is not None  # no comparison stands for it otherwise
    holds = (row.difference > 0) == (row.better == "higher")
    tokens = max(one["tokens_per_step"] for one in results.variants) * (row.steps or 0) / 1e6
    values = " against ".join(map(format_number, row.ours))
    so_far = " so far" if row.verdict == "still learning" else ""
    return (
        f"- [{name}]({report}#{results.anchor}), {tokens:.1f}M tokens: {results.file.headline.claim}: "
        f"**{'yes' if holds else 'no'}**{so_far}, {values}{row.unit and f' {row.unit}'} (p = {p:.3f})."
    )


def attention_types() -> str:
    """What sets the attention types apart, counted for one layer."""
    columns = (
        "`attention_type`",
        "query heads",
        "maps of a head",
        "λ",
        "norm of each head",
        "weights",
        "multiply-adds",
    )
    header = f"| {' | '.join([*columns, 'cache of a token', 'tensor parallelism'])} |"
    return "\n".join([header, "|---" * 9 + "|", *(_row(name, one) for name, one in ATTENTION_TYPES.items())])


def _row(name: str, one: AttentionType) -> str:
    sizes = DiffTransformerConfig(
        attention_type=name,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        num_noise_heads=NOISE_HEADS if one.grouped else None,
        num_hidden_layers=1,
    )
    call: Any = sizes.get_text_config()  # the layer's one attention call, whose keys and values are cached
    if not one.lambda_modules:
        coefficient = "–"
    else:
        coefficient = "one for each token and head" if one.lambda_per_token else "one for the layer"
    cells = (
        f"`{name}`",
        str(call.num_attention_heads),
        str(one.maps),
        coefficient,
        "yes" if one.headwise_norm else "no",
        f"{one.attention_weights(sizes):,}",
        f"{one.attention_products(sizes):,}",
        f"{2 * call.num_key_value_heads * call.head_dim:,}",
        "yes" if one.parallel_refusal is None else "after folding",
    )
    return f"| {' | '.join(cells)} |"


def measured_variants(experiments: Sequence[ExperimentResults]) -> str:
    """Losses on text of every variant beside the Transformer's, with what was trained."""
    columns = ("trained on", "variant", "loss", "the Transformer's", "difference", "better than the Transformer?")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for results, row in _losses(experiments):
        size = " and ".join(sorted({f"{one['parameters'] / 1e6:.2f}M" for one in results.variants}))
        part = f", {row.coordinates['part']}" if "part" in row.coordinates else ""
        losses = " | ".join(map(format_number, row.ours))
        lines.append(
            f"| {results.heading}, {size} parameters{part} | {variant_label(row.variant)} | {losses} | "
            f"{format_difference(row)} | {verdict_text(row).removeprefix('open question: ')} |"
        )
    return "\n".join(lines)


def _losses(experiments: Sequence[ExperimentResults]) -> Iterator[tuple[ExperimentResults, Comparison]]:
    for results in experiments:
        if results.name in COMPARED:
            for row in results.file.comparisons:
                if row.name == WHOLE and row.against == "softmax":
                    yield results, row
