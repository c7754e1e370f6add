"""Makes what the documentation's pages say of findings and of attention types, from results and descriptions.

`lab/benchmarks/fill_readme.py` writes it into README.md, docs/index.md and docs/concepts/which-one.md.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from diff_lab.measure.document_losses import WHOLE
from diff_lab.record import Comparison
from diff_lab.report.findings import LEVEL, ExperimentResults, Finding, findings
from diff_lab.report.wording import ANSWERS, format_difference, format_number, remarks, variant_label, verdict_text
from diff_transformer.attention_types import ATTENTION_TYPES, AttentionType
from diff_transformer.model import DiffTransformerConfig

# The layer that types are counted for.
WIDTH, HEADS, HEAD_DIM, NOISE_HEADS = 1024, 16, 64, 4
# The experiments whose losses of several variants stand beside each other.
COMPARED = ("v2", "language")


def known(experiments: Sequence[ExperimentResults], report: str) -> str:
    """Say which comparisons have a small p after a correction for their number, and how that of noise came out.

    Links lead into the report. The paper's claim is about noise, so its comparison is told whatever its p.

    Args:
        experiments: all results.
        report: path of the report from the page.
    """
    found = findings(experiments)
    tested = [one for one in found if one.p is not None]
    left = [one for one in tested if (one.p or 0.0) < LEVEL]
    told = left + [one for one in tested if one not in left and one.results.anchor.startswith("noise")]
    sizes = [variant["parameters"] for one in experiments for variant in one.variants]
    decided = [one for one in found if one.is_decided]
    against = [one for one in decided if one.row.verdict == "contrary"]
    lost = ", ".join(f"[{one.name}]({_page(one, report)}) (p = {one.p:.3f})" for one in against) + "."
    some = "1 has" if len(left) == 1 else f"{len(left)} have"
    return (
        f"Of {len(tested)} [comparisons]({report}) of models with {min(sizes) / 1e6:.2f}M to {max(sizes) / 1e6:.2f}M "
        f"parameters, over paired seeds, {some} p < {LEVEL} after Holm's correction, and without a "
        f"correction {len(found) - len(decided)} of all {len(found)} are undecided and {len(against)} of the other "
        f"{len(decided)} go against the claim. Below are those with p < {LEVEL}, and the paper's question, noise (p is "
        "Holm's):"
        "\n\n"
        + "\n".join(_sentence(one, report) for one in told)
        + "\n\nAgainst the claim before the correction: "
        + lost
    )


def _page(one: Finding, report: str) -> str:
    return f"{report.removesuffix('RESULTS.md')}experiments/{one.results.anchor}.md"


def _sentence(one: Finding, report: str) -> str:
    """The claim of an experiment, whether it holds, Holm's p, and who was still training."""
    tokens = max(variant["tokens_per_step"] for variant in one.results.variants) * (one.row.steps or 0) / 1e6
    after = f", {tokens:.1f}M tokens" if tokens else ""
    limits = "; ".join(filter(None, (f"p = {one.p:.3f}", remarks(one.row))))
    answer = ANSWERS[one.row.verdict] + (" before the correction" if one.is_decided and (one.p or 0.0) >= LEVEL else "")
    return f"- [{one.name}]({_page(one, report)}){after}: {one.claim}: **{answer}**, {one.values} ({limits})."


def attention_types() -> str:
    """What sets the attention types apart, counted for one layer."""
    sizes = ("maps of a head", "λ", "norm of each head", "weights", "multiply-adds", "cache of a token")
    header = f"| `attention_type` | query heads | {' | '.join(sizes)} | tensor parallelism |"
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
        "2" if one.differential else "1",
        coefficient,
        "yes" if one.headwise_norm else "no",
        f"{one.attention_weights(sizes):,}",
        f"{one.attention_products(sizes):,}",
        f"{(1 if one.latent else 2) * call.num_key_value_heads * call.head_dim:,}",
        "yes" if one.parallel_refusal is None else "after folding" if one.corrects_heads else "no",
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
