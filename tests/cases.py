"""The cases of the operator that every backend is tested on, by name."""

from dataclasses import replace

import torch

from budget import LAMBDAS, MASKS, Case

CASES: dict[str, Case] = {
    "no mask": Case(),
    "causal": Case(is_causal=True),
    "one query, one key": Case(queries=1, keys=1, is_causal=True),
    "decoding one token": Case(queries=1, keys=9, is_causal=True),
    "decoding one token, padded": Case(queries=1, keys=19, heads=4, mask="bool (B, 1, 1, S)"),
    "decoding one token, additive mask, window": Case(
        queries=1, keys=19, heads=4, mask="add -inf (B, 1, N, S)", is_causal=True, window=15
    ),
    "decoding three tokens": Case(queries=3, keys=11, is_causal=True),
    "more queries than keys, causal": Case(queries=11, keys=5, is_causal=True),
    "more queries than keys": Case(queries=11, keys=5),
    "more keys than queries": Case(queries=5, keys=11),
    "63 tokens": Case(batch=1, queries=63, keys=63, is_causal=True, d=8, dv=16),
    "111 tokens, grouped": Case(batch=1, key_heads=1, queries=111, keys=111, is_causal=True),
    "257 tokens": Case(batch=1, heads=1, key_heads=1, queries=257, keys=257, is_causal=True, gain=1.6),
    "63 of 111 tokens": Case(batch=1, heads=1, key_heads=1, queries=63, keys=111, is_causal=True),
    "111 tokens, 63 keys": Case(batch=1, heads=1, key_heads=1, queries=111, keys=63, is_causal=True),
    "grouped": Case(heads=6, key_heads=2),
    "grouped, causal, decoding": Case(heads=6, key_heads=3, queries=4, keys=7, is_causal=True),
    "one key head": Case(heads=4, key_heads=1, is_causal=True),
    "shared keys": Case(key_maps=1, is_causal=True),
    "shared keys, grouped": Case(key_maps=1, heads=6, key_heads=2, queries=5, dv=4),
    **{
        f"{ratio} signal heads to a noise map{name}": Case(ratio=ratio, heads=2 * ratio, **options)
        for ratio in (2, 3)
        for name, options in {
            "": {},
            ", causal, projection": {"is_causal": True, "layout": "projection", "lam": "full"},
            ", decoding one token": {"queries": 1, "keys": 19, "is_causal": True, "layout": "cache"},
            ", decoding three tokens, padded": {"queries": 3, "keys": 11, "mask": "bool (B, 1, 1, S)"},
            ", window, mask of all heads": {"window": 4, "is_causal": True, "mask": "add -inf (B, 1, N, S)"},
            ", a mask for each head": {"mask": "bool (B, H, N, S)", "is_causal": True, "lam": "per head"},
            ", one key head": {"key_heads": 1, "is_causal": True, "lam": "full"},
            ", shared keys, expanded": {"key_maps": 1, "layout": "expanded"},
            ", documents": {"batch": 1, "documents": (2, 3, 4), "is_causal": True, "lam": "per token"},
            ", 111 tokens": {"batch": 1, "key_heads": 1, "queries": 111, "keys": 111, "is_causal": True},
        }.items()
    },
    "dv = d": Case(dv=4, is_causal=True),
    "dv = 1": Case(dv=1),
    "d and dv odd": Case(d=5, dv=7, is_causal=True),
    "d > dv": Case(d=13, dv=3),
    "d = 1": Case(d=1, dv=2),
    "window 1": Case(window=1, is_causal=True),
    "window 3": Case(window=3, is_causal=True),
    "window of all keys": Case(window=9, is_causal=True),
    "window beyond all keys": Case(window=10**6, is_causal=True),
    "window beyond 64 bits": Case(window=10**30, is_causal=True),
    "window 3, not causal": Case(window=3),
    "window 2, decoding": Case(window=2, is_causal=True, queries=3, keys=11),
    "window 2, more queries than keys": Case(window=2, is_causal=True, queries=11, keys=5),
    "window 2, more queries than keys, not causal": Case(window=2, queries=11, keys=5),
    "window 17 of 111 tokens": Case(batch=1, heads=1, key_heads=1, queries=111, keys=111, window=17),
    "scale 0.9": Case(scale=0.9, gain=1.5),
    "scale 0": Case(scale=0.0, is_causal=True),
    "negative scale": Case(scale=-0.5, is_causal=True),
    "projection layout": Case(layout="projection", heads=4, is_causal=True),
    "cache layout": Case(layout="cache", heads=4, queries=5, is_causal=True),
    "expanded layout": Case(layout="expanded", heads=4, is_causal=True),
    "very peaked": Case(gain=6.0, is_causal=True),
    "nearly uniform": Case(gain=0.1, is_causal=True),
    **{f"mask {kind}": Case(mask=kind, batch=3, queries=7) for kind in MASKS},
    **{f"causal and mask {kind}": Case(mask=kind, batch=3, is_causal=True) for kind in MASKS},
    "mask, causal, window, grouped, shared keys": Case(
        mask="bool (B, H, N, S)", is_causal=True, window=4, heads=4, key_maps=1, queries=6, keys=11
    ),
    "additive mask, causal, window, grouped, cache": Case(
        mask="add -inf (B, 1, N, S)", is_causal=True, window=6, heads=4, queries=7, layout="cache", lam="full"
    ),
    "one document": Case(batch=1, documents=(9,), is_causal=True),
    "documents": Case(batch=1, documents=(2, 3, 4), is_causal=True),
    "documents, not causal": Case(batch=1, documents=(4, 1, 4)),
    "documents of one token": Case(batch=1, documents=(1,) * 9, is_causal=True),
    "documents of one token, not causal": Case(batch=1, documents=(1,) * 9),
    "empty documents": Case(batch=1, documents=(0, 3, 0, 0, 5, 1, 0), is_causal=True),
    "documents and window": Case(batch=1, documents=(2, 6, 1), is_causal=True, window=2),
    "documents and window, not causal": Case(batch=1, documents=(2, 6, 1), window=3),
    "documents and mask bool (B, 1, 1, S)": Case(batch=1, documents=(3, 6), mask="bool (B, 1, 1, S)"),
    "documents and mask add -inf (N, S)": Case(batch=1, documents=(3, 1, 5), mask="add -inf (N, S)", is_causal=True),
    "documents, grouped, shared keys, λ full": Case(
        batch=1, documents=(4, 2, 3), heads=6, key_heads=2, key_maps=1, lam="full", is_causal=True
    ),
    "documents, grouped, mask, window, projection": Case(
        batch=1, documents=(1, 7, 1), heads=4, mask="bool (B, H, N, S)", window=4, lam="per token", layout="projection"
    ),
    "two tokens, two documents": Case(batch=1, documents=(1, 1), queries=2, keys=2, is_causal=True),
    "documents of 63, 1, 82 and 111 tokens": Case(
        batch=1, heads=1, key_heads=1, queries=257, keys=257, documents=(63, 1, 82, 111), is_causal=True, gain=1.6
    ),
    **{f"λ {kind}": Case(lam=kind, heads=4, is_causal=True, queries=7) for kind in LAMBDAS},
}

# Those that half precision and slow backends are tried on in `make test`: causality, windows, masks, padding,
# documents, grouped and shared keys, N ≠ S, odd lengths and widths, λ of every token, and memory with gaps.
REPRESENTATIVE = (
    "no mask",
    "causal",
    "one query, one key",
    "decoding one token, padded",
    "decoding one token, additive mask, window",
    "more queries than keys, causal",
    "63 of 111 tokens",
    "111 tokens, 63 keys",
    "257 tokens",
    "shared keys, grouped",
    "2 signal heads to a noise map, one key head",
    "3 signal heads to a noise map, causal, projection",
    "3 signal heads to a noise map, decoding one token",
    "3 signal heads to a noise map, window, mask of all heads",
    "d and dv odd",
    "window 2, decoding",
    "window 17 of 111 tokens",
    "very peaked",
    "cache layout",
    "mask bool (H, 1, S)",
    "causal and mask add min (B, 1, N, S)",
    "mask, causal, window, grouped, shared keys",
    "additive mask, causal, window, grouped, cache",
    "documents of 63, 1, 82 and 111 tokens",
    "documents, grouped, shared keys, λ full",
    "documents, grouped, mask, window, projection",
)
assert set(REPRESENTATIVE) <= set(CASES)


def case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    """The case of this name, in inputs of ``dtype``."""
    return replace(CASES[name], dtype=dtype)
