"""Makes the variants of experiments: DIFF and the Transformer, and others of the same size, by the name of a function.

Sizes are those of the Transformer. More settings of all variants are texts ("train.steps=50") or values by section.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Variant, equal_feed_forward, section
from diff_transformer.model import DiffTransformerConfig

NO_NORM, CONSTANT = "diff, no headwise norm", "diff, λ_init 0.8"
QUERY_HEADS, KEY_HEADS = 20, 2  # of groups: both 3 + 1 and 4 + 1 divide 20
NOISE_HEADS = {3: 5, 4: 4}  # signal heads to a noise head → noise heads
THREE_TO_ONE = "diff_grouped, 3 signal heads to one"


def written(parts: Iterable[Any]) -> tuple[str, ...]:
    """Write settings of a recipe as overrides: texts, values by section, and lists of both."""
    overrides: list[str] = []
    for part in parts:
        if isinstance(part, str):
            overrides.append(part)
        elif isinstance(part, Mapping):
            for name, settings in part.items():
                overrides += section(name, **settings)
        else:
            overrides += written(part)
    return tuple(overrides)


def diff_and_softmax(*settings: Any, coordinates: Coordinates = NO_COORDINATES) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer with these settings."""
    return tuple(one.changed(*written(settings), coordinates=coordinates) for one in DIFF_AND_SOFTMAX)


def sized(parameters: float, layers: int, width: int, feed_forward: int, head_dim: int) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer at a size: parameters as the paper counts them."""
    model = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": feed_forward, "head_dim": head_dim}
    return diff_and_softmax({"model": model}, coordinates=Coordinates(parameters=parameters))


def at_rates(*rates: float) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer at each learning rate."""
    return tuple(
        variant
        for rate in rates
        for variant in diff_and_softmax(f"train.learning_rate={rate!r}", coordinates=Coordinates(learning_rate=rate))
    )


def table_6(heads: int, head_dim: int) -> tuple[Variant, ...]:
    """Return the rows of Table 6; half of the heads are twice as wide.

    The headwise norm of the Transformer is over each head's own channels, without DIFF's factor 1 − λ_init, which
    undoes the subtraction's effect on the gradient. Without the norm, DIFF has no such factor either.
    """
    full = section("model", num_attention_heads=heads, head_dim=head_dim)
    half = section("model", num_attention_heads=heads // 2, head_dim=2 * head_dim)
    softmax, diff = "model.attention_type=softmax", "model.attention_type=diff"
    rows = {
        "softmax": (softmax, *full),
        "softmax, half the heads": (softmax, *half),
        "softmax, half the heads, headwise norm": (softmax, *half, "model.headwise_norm=true"),
        "diff": (diff, *full),
        NO_NORM: (diff, *full, "model.headwise_norm=false"),
        CONSTANT: (diff, *full, "model.lambda_init=0.8"),
        "diff, λ_init 0.5": (diff, *full, "model.lambda_init=0.5"),
    }
    return tuple(Variant(name=name, overrides=rows[name]) for name in rows)


def with_v2(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """Return DIFF V2, whose feed-forward network pays for its queries and W_λ, DIFF, and the Transformer."""
    sizes = {"hidden_size": hidden_size, "num_attention_heads": heads, "head_dim": head_dim}
    version_2, transformer = (
        DiffTransformerConfig(attention_type=kind, intermediate_size=feed_forward, **sizes)
        for kind in ("diff_v2", "softmax")
    )
    narrower = section("model", **sizes, intermediate_size=equal_feed_forward(version_2, transformer))
    return (
        Variant(name="diff_v2", overrides=("model.attention_type=diff_v2", *narrower)),
        *diff_and_softmax(*section("model", **sizes, intermediate_size=feed_forward)),
    )


def with_controls(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """Return the variants of `with_v2`, the Transformer with a headwise norm, and DIFF whose λ is fixed at 0."""
    v2, diff, softmax = with_v2(hidden_size, heads, head_dim, feed_forward)
    norm = softmax.changed("model.headwise_norm=true", name="softmax, headwise norm")
    without = diff.changed(*section("model", lambda_init=0, fixed_lambda=True), name="diff, λ 0")
    return v2, diff, softmax, norm, without


def with_groups(hidden_size: int, heads: int, head_dim: int, feed_forward: int) -> tuple[Variant, ...]:
    """Return the variants of `with_v2`, and groups of three signal heads and a noise head, of as many parameters."""
    v2, diff, softmax = with_v2(hidden_size, heads, head_dim, feed_forward)
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "num_attention_heads": heads, "head_dim": head_dim}
    like = DiffTransformerConfig(attention_type="softmax", intermediate_size=feed_forward, **sizes)
    own: dict[str, Any] = {"attention_type": "diff_grouped", "num_noise_heads": heads // 4}
    narrower = equal_feed_forward(DiffTransformerConfig(intermediate_size=feed_forward, **sizes, **own), like)
    groups = diff.changed(*section("model", **own, intermediate_size=narrower), name=THREE_TO_ONE)
    return v2, diff, groups, softmax


def parts(
    parameters: float, layers: int, hidden_size: int, feed_forward: int, heads: int, *settings: Any
) -> tuple[Variant, ...]:
    """Return DIFF, the Transformer, DIFF with a constant λ_init, DIFF without headwise norm, and DIFF V2, at a size."""
    v2, diff, softmax = with_v2(hidden_size, heads, hidden_size // heads, feed_forward)
    constant = diff.changed("model.lambda_init=0.8", name=CONSTANT)
    no_norm = diff.changed("model.headwise_norm=false", name=NO_NORM)
    shared, size = written((f"model.num_hidden_layers={layers}", *settings)), Coordinates(parameters=round(parameters))
    return tuple(one.changed(*shared, coordinates=size) for one in (diff, softmax, constant, no_norm, v2))


def without_parts(*size: Any) -> tuple[Variant, ...]:
    """Return DIFF, the Transformer and DIFF V2 of `parts`."""
    return tuple(one for one in parts(*size) if one.name in ("diff", "softmax", "diff_v2"))


def parts_from_large_start(*size: Any) -> tuple[Variant, ...]:
    """Return DIFF and the Transformer of `parts` with first weights of one size in all matrices."""
    return tuple(
        one.changed(
            "model.residual_initializer_range=null",
            coordinates=Coordinates(one.coordinates, part="first weights of one size"),
        )
        for one in parts(*size)
        if one.name in ("diff", "softmax")
    )


def grouped(
    hidden_size: int, head_dim: int, feed_forward: int, layers: int | None, *settings: Any
) -> tuple[Variant, ...]:
    """Return DIFF, groups of three and of four signal heads, and the Transformer.

    All have as many query heads, one cache size and, by narrower feed-forward networks, as many parameters.
    """
    heads = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": KEY_HEADS}
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "head_dim": head_dim, **heads}
    like = DiffTransformerConfig(attention_type="softmax", intermediate_size=feed_forward, **sizes)
    depth = {} if layers is None else {"num_hidden_layers": layers}
    shared, more = written(({"model": {**sizes, **depth}},)), written(settings)
    groups = []
    for ratio, noise_heads in NOISE_HEADS.items():
        own: dict[str, Any] = {"attention_type": "diff_grouped", "num_noise_heads": noise_heads}
        width = equal_feed_forward(DiffTransformerConfig(intermediate_size=feed_forward, **sizes, **own), like)
        name = THREE_TO_ONE.replace("3", str(ratio))
        groups.append(Variant(name=name, overrides=(*shared, *section("model", **own, intermediate_size=width), *more)))
    diff, softmax = diff_and_softmax(*shared, f"model.intermediate_size={feed_forward}", *more)
    return (diff, *groups, softmax)
