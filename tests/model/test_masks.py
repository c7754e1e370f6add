"""Every form of mask says the same, and documents packed into one row are told apart by their positions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache

from tiny_model import COMPUTES_IN, IMPLEMENTATIONS, make, needs_vectors, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LOWEST = torch.finfo(torch.float32).min


def padded(tokens: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens (2, 9) and their mask: three of the first row are padding, on the left."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    return tokens(), mask


def visible(mask: Tensor) -> Tensor:
    """(B, N), 0 at padding → which key each query sees, (B, 1, N, N)."""
    n = mask.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril() & mask[:, None, None, :].bool()


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "2-D, whole numbers": lambda mask: mask,
    "2-D, boolean": lambda mask: mask.bool(),
    "2-D, numbers": lambda mask: mask.double(),
    "4-D, boolean": visible,
    "4-D, additive": lambda mask: torch.zeros(2, 1, 9, 9).masked_fill(~visible(mask), LOWEST).double(),
    "by type of layer": lambda mask: {"full_attention": visible(mask)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forms_agree(kind: str, implementation: str, form: str) -> None:
    """At real tokens, logits are those of the row alone: for each form, without a cache and with one."""
    dtype = torch.float32 if implementation == "eager" else torch.float64  # eager in float64: NaN for rows of padding
    model = make(kind, dtype, attn_implementation=implementation)
    inputs, mask = padded(tokens)
    with torch.no_grad():
        alone = model(inputs[:1, 3:]).logits[0], model(inputs[1:]).logits[0]
        mask_of_form = FORMS[form](mask)
        if form == "4-D, additive":
            mask_of_form = mask_of_form.to(dtype)
        for options in ({"use_cache": False}, {"past_key_values": DynamicCache(config=model.config)}):
            logits = model(inputs, attention_mask=mask_of_form, **options).logits
            for row, expected in enumerate(alone):
                # Positions are counted over the padding as well: only distances matter, up to the tables' float32.
                check(logits[row, -len(expected) :], expected, dtype=torch.float32)


@pytest.mark.parametrize("form", ["boolean", "additive"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tree(kind: str, implementation: str, form: str) -> None:
    """Three continuations of one prompt in one row, each blind to the others: what speculative decoding asks for."""
    dtype = torch.float32 if implementation == "eager" else torch.float64
    model, prompt = make(kind, dtype, attn_implementation=implementation), tokens(1, 4)
    ends = torch.tensor([3, 8, 11])
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    seen[4:, 4:] = torch.eye(3, dtype=torch.bool)
    mask: Tensor = seen[None, None]
    if form == "additive":
        mask = torch.zeros(1, 1, 7, 7, dtype=dtype).masked_fill(~mask, LOWEST)
    row, positions = torch.cat((prompt, ends[None]), 1), torch.tensor([[0, 1, 2, 3, 4, 4, 4]])
    with torch.no_grad():
        packed = model(row, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, 4:]
        alone = [model(torch.cat((prompt, end.view(1, 1)), 1)).logits[0, -1] for end in ends]
        check(packed, torch.stack(alone))
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache)
        continuation = {"attention_mask": mask[:, :, 4:], "position_ids": positions[:, 4:], "past_key_values": cache}
        check(model(ends[None], **continuation).logits[0], packed)


@needs_vectors
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning"
)  # as it is here, for speed
@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_flex", "flex_attention"])
def test_a_block_mask(kind: str, implementation: str) -> None:
    """FlexAttention's own form, as the caller made it."""
    model, inputs = make(kind, torch.float32, attn_implementation=implementation), tokens()

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k > q - 3)

    mask = create_block_mask(sees, None, None, 9, 9, device="cpu")
    i = torch.arange(9)
    dense = sees(i, i, i[:, None], i[None, :])[None, None]
    reference = make(kind, torch.float32, attn_implementation="diff_attention_reference").double()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = reference(inputs, attention_mask=dense, use_cache=False).logits
        assert (reference(inputs).logits - expected).abs().max() > 0.1
        check(model(inputs, attention_mask=mask, use_cache=False).logits, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents(kind: str, implementation: str) -> None:
    """Each document's logits are those of a run of its own, also one of a single token, and while a cache is filled."""
    model, parts = make(kind, attn_implementation=implementation), [tokens(1, n) for n in (5, 1, 8, 2)]
    row, positions = torch.cat(parts, 1), torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        logits = model(row, position_ids=positions, use_cache=True).logits
        apart = torch.cat([model(part).logits for part in parts], 1)
        check(logits, apart, dtype=COMPUTES_IN.get(implementation))
        assert (model(row).logits - apart)[:, 5:].abs().max() > 0.1


def test_a_mask_of_tokens_to_come(kind: str) -> None:
    """A 2-D mask wider than the tokens, as for a static cache to be filled, means the tokens that are there."""
    model, (inputs, mask) = make(kind), padded(tokens)
    with torch.no_grad():
        for tokens_mask in (mask, torch.ones_like(mask)):
            expected = model(inputs, attention_mask=tokens_mask).logits
            wider = torch.nn.functional.pad(tokens_mask, (0, 4), value=1)
            check(model(inputs, attention_mask=wider).logits, expected)


NO_NUMBERS = r"^attention_mask must be a dense tensor that holds its own numbers, got a"
FOUR_AXES = r"^attention_mask of four axes must be boolean, .* got {}\.$"  # ones and zeros that are added hide nothing
REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "bias": (lambda: causal_upper_left(9, 9), NO_NUMBERS),
    "sparse": (lambda: torch.ones(1, 1, 9, 9).tril().to_sparse(), NO_NUMBERS),
    "int64": (lambda: torch.ones(1, 1, 9, 9).long(), FOUR_AXES.format(torch.int64)),
    "float8": (lambda: torch.ones(1, 1, 9, 9).to(torch.float8_e4m3fn), FOUR_AXES.format(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "diff_attention"])
def test_one_position_of_all_tokens_hides_none(implementation: str) -> None:
    model, ids, zeros = make("diff", sliding_window=3).eval(), tokens(), torch.zeros(1, 1, dtype=torch.long)
    model.set_attn_implementation(implementation)
    all_seen = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    expected = model(ids, position_ids=zeros.expand(ids.shape), **all_seen).logits
    for given in ({"use_cache": False}, all_seen):
        torch.testing.assert_close(model(ids, position_ids=zeros, **given).logits, expected)


@pytest.mark.parametrize("mask", REFUSED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_refused(implementation: str, mask: str) -> None:
    given, message = REFUSED[mask]
    model = make("diff", torch.float32, attn_implementation=implementation)
    with pytest.raises((TypeError, ValueError), match=message):
        model(tokens(), attention_mask=given())
