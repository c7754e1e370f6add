"""The attention maps of one example: three maps of a DIFF head beside the map of its twin."""

import math
from pathlib import Path

from diff_transformer.report import figures, markup
from diff_transformer.report.figures import ARM_COLOURS, MUTED, THEME
from diff_transformer.report.rows import arm_label
from diff_transformer.results import AttentionExample, read_attention

DEFINITIONS = (
    (
        "Attention to the answer",
        "The weight that the query which has to give an answer puts on this answer's position.",
    ),
    ("Attention noise", "The weight that the same query puts on all of the context but the answer and its key."),
    (
        "Signed",
        "The sum of the weights A there. DIFF's can be negative, and a whole row of them sums to 1 − λ, not to 1, so "
        "its signed sums are smaller before anything is learned.",
    ),
    ("Share", "The sum of |A| there divided by the sum of |A| over the whole row, so that both arms are on one scale."),
)
TITLES = {
    ("diff", "A1"): "DIFF: A1",
    ("diff", "A2"): "DIFF: A2",
    ("diff", "difference"): "DIFF: A1 − λA2",
    ("softmax", "A"): "Transformer: A",
}


def query_section(path: Path) -> str:
    """What one query of `attention.json` attends to, which shows what DIFF does; nothing where there is none."""
    example = read_attention(path) if path.is_file() else None
    drawn = [] if example is None else _row_figures(example)
    if example is None or not drawn:
        return ""
    answers = ", ".join(f"“{example.tokens[place]}” (position {place})" for place in example.answer_positions)
    return markup.section(
        "What one query attends to",
        markup.grid(*drawn),
        markup.paragraph(
            f"The query “{example.tokens[example.query_position]}” (position {example.query_position}) must find the "
            f"answer {answers}, marked by ▾; shading marks the hidden pairs. Shown are "
            f"{' and '.join(_where(example, arm) for arm in example.layers)}: in each model the head that puts the "
            "most of its weight on the answers."
        ),
    )


def example_section(path: Path) -> str:
    """The section on the maps of `attention.json`, or one that says that it is missing."""
    title = "Attention maps of one example"
    if not path.is_file():
        return markup.section(title, markup.note("attention.json is missing: there are no maps to show."))
    example = read_attention(path)
    maps = {key: example.maps[key[0]][key[1]] for key in TITLES if key[1] in example.maps.get(key[0], {})}
    if not maps:
        return markup.section(title, markup.note("attention.json holds no maps."))
    largest = max(abs(weight) for rows in maps.values() for row in rows for weight in row if math.isfinite(weight))
    return markup.section(
        title,
        markup.paragraph(
            "All queries of the heads that stand above, one of them marked ▸; its answer is marked by a strong ▾, the "
            "hidden pairs by faint ones. All maps share one scale: no colour is 0, red is positive, blue is negative, "
            f"{largest:.2f} is the largest size of a weight in any of them, and colours grow as the square root, so "
            "that small weights can be seen. What comes after a query is hidden from it, and left blank."
        ),
        markup.grid(*(_map_figure(example, rows, TITLES[key], largest or 1.0) for key, rows in maps.items())),
    )


def _where(example: AttentionExample, arm: str) -> str:
    strength = f" (λ = {example.lambda_:.3f})" if arm == "diff" else ""
    return f"head {example.heads[arm]} of layer {example.layers[arm]} of {arm_label(arm)}{strength}"


def _map_figure(example: AttentionExample, rows: list[list[float]], title: str, largest: float) -> str:
    at_answer = ", ".join(f"{rows[example.query_position][place]:.2f}" for place in example.answer_positions)
    drawing = figures.attention_map(
        rows,
        title=title,
        largest=largest,
        query=example.query_position,
        needles=example.needle_positions,
        answers=example.answer_positions,
    )
    return markup.figure(drawing, f"{title}: every query's weights; the marked query gives the answer {at_answer}.")


def _row_figures(example: AttentionExample) -> list[str]:
    """The marked query's row of each map as lines, the arms on one scale."""
    seen = example.query_position + 1
    diff = {name: rows[example.query_position][:seen] for name, rows in example.maps.get("diff", {}).items()}
    twin = {name: rows[example.query_position][:seen] for name, rows in example.maps.get("softmax", {}).items()}
    lines: dict[str, tuple[dict[str, list[float]], tuple[str, ...]]] = {}
    if {"A1", "A2", "difference"} <= diff.keys():
        subtracted = [example.lambda_ * weight for weight in diff["A2"]]
        lines["DIFF"] = (
            {"A1": diff["A1"], "λA2": subtracted, "A1 − λA2": diff["difference"]},
            (MUTED, THEME["fourth"][0], ARM_COLOURS["diff"]),
        )
    if "A" in twin:
        lines["Transformer"] = ({"A": twin["A"]}, (ARM_COLOURS["softmax"],))
    weights = [weight for named, _ in lines.values() for row in named.values() for weight in row]
    limits = (1.1 * min(0.0, *weights), 1.1 * max(weights)) if weights else (0.0, 1.0)
    return [
        markup.figure(
            figures.attention_row(
                named,
                colours,
                title=f"{arm}: the marked query's weights",
                limits=limits,
                needles=example.needle_positions,
                answers=example.answer_positions,
            ),
            f"{arm}: the marked query's weights over the positions up to it; largest at position "
            f"{max(range(seen), key=[*named.values()][-1].__getitem__)}.",
        )
        for arm, (named, colours) in lines.items()
    ]
