"""Documents packed into one row by transformers' names: what each gives alone, without a mask of the row.

The truth is one document after the other through the reference, in float64.
"""

import inspect
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

import flash_stand_in
from diff_lab.data.batches import flattened
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model import attends_by_document, modeling
from diff_transformer.model.interface_attention import attend_by_document
from tiny_model import DIFFERENTIAL, KINDS, NOT_LATENT, answers, check_answers, make
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRUTH = "diff_attention_reference"
ALL_KINDS = (*KINDS, "dex")
# Rows of the batch, as their documents' lengths: of one token, longer and shorter than a window of 3.
ROWS = ((5, 1, 6), (12,), (2, 2, 8))
LENGTHS = [length for row in ROWS for length in row]
WINDOWS: dict[str, dict[str, Any]] = {
    "no window": {},
    "window": {"sliding_window": 3},
    "window in one layer": {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
}


def batch_of(rows: tuple[tuple[int, ...], ...] = ROWS) -> dict[str, Tensor]:
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    inputs = torch.randint(1, 29, positions.shape)
    return {"input_ids": inputs, "labels": inputs.masked_fill(positions == 0, -100), "position_ids": positions}


def exact(model: DiffTransformerForCausalLM, row: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """The mean loss of documents (1, N) read one by one, and its gradients."""
    loss = row.new_zeros((), dtype=torch.float64)
    for document in row.split(lengths, dim=1):
        logits = model(document, use_cache=False).logits[0, :-1]
        loss = loss + F.cross_entropy(logits.double(), document[0, 1:], reduction="sum")
    return answers(model, loss / (row.shape[1] - len(lengths)))


@pytest.fixture
def masks_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that the forward passes made."""
    made: list[Any] = []

    def masked(function: Any, **arguments: Any) -> Any:
        mask = function(**arguments)
        made.extend([] if mask is None else [mask])
        return mask

    mask_functions = modeling.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    for kind, function in list(mask_functions.items()):
        monkeypatch.setitem(mask_functions, kind, partial(masked, function))
    return made


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_and_gradients_are_those_of_the_documents_alone(
    kind: str, window: str, masks_made: list[Any], ran: Counter[str]
) -> None:
    """Flattened, without a mask; and as the batch of rows with one, which the first must not be worse than."""
    batch, config = batch_of(), WINDOWS[window]
    row = flattened(batch)
    truth = exact(make(kind, attn_implementation=TRUTH, **config), row["input_ids"], LENGTHS)
    model = make(kind, **config)
    assert attends_by_document(model.config)
    ran.clear()
    computed = answers(model, model(**row, use_cache=False, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss)
    assert ran == ({"blockwise": 2} if kind in DIFFERENTIAL else {"torch": 2 * len(LENGTHS)})
    # torch's attention has no window: of each document there is a mask, and never one of the row.
    assert all(kind not in DIFFERENTIAL and mask.shape[-1] <= max(LENGTHS) for mask in masks_made)
    check_answers(computed, truth, torch.float32)  # the loss upcasts to float32
    rows = answers(model, model(**batch, use_cache=False, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss)
    assert masks_made
    check_answers(rows, computed, torch.float32)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", *flash_stand_in.NAMES])
def test_other_implementations_read_them_as_in_transformers(
    kind: str, implementation: str, masks_made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention from the arguments, the others from the positions, also where only the arguments tell them."""
    if kind not in NOT_LATENT and implementation in flash_stand_in.NAMES:
        return  # which refuses it
    flash = flash_stand_in.install(monkeypatch)
    row = flattened(batch_of())
    truth = exact(make(kind, attn_implementation=TRUTH), row["input_ids"], LENGTHS)
    model = make(kind, attn_implementation=implementation)
    assert not attends_by_document(model.config)
    for inputs in (row, {name: value for name, value in row.items() if name != "position_ids"}):
        masks_made.clear()
        flash.clear()
        check_answers(answers(model, model(**inputs, use_cache=False).loss), truth, torch.float32)
        if implementation in flash_stand_in.NAMES:
            assert flash == ["flash_attn_varlen_func"] * 2
        else:
            assert len(masks_made) == 1


def test_a_collator_of_transformers(kind: str, masks_made: list[Any]) -> None:
    """Its batch as it is, also without positions; in evaluation, where a cache is asked for unless told otherwise."""
    parts = [torch.randint(1, 29, (1, n)) for n in (5, 1, 6)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": part[0].tolist()} for part in parts])
    model = make(kind)
    with torch.no_grad():
        expected = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        out = model(**batch)
        check(out.logits, expected)
        assert out.past_key_values is None
        del batch["position_ids"]
        assert torch.equal(model(**batch).logits, out.logits)
    assert not masks_made


@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (3, True), (None, False)])
def test_a_kernel_for_several_lengths(window: int | None, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's kernel on the GPU is asked for, answered by the stand-in for FlashAttention."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    signature = inspect.signature(varlen.varlen_attn)
    if "window_size" not in signature.parameters:
        pytest.skip("this release of torch does not pass on a window")

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        q, k, v, ends, key_ends, longest, key_longest = bound.args
        assert ends.dtype == torch.int32
        assert bound.kwargs["enable_gqa"]
        calls.append(longest)
        options = {"softmax_scale": bound.kwargs["scale"], "window_size": bound.kwargs["window_size"]}
        return flash_stand_in.flash_attn_varlen_func(q, k, v, ends, key_ends, longest, key_longest, **options)

    calls: list[int] = []
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    query = torch.randn(1, 4, 20, 8, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in range(2))
    settings = (torch.tensor([0, 9, 9, 10, 20]), 0.3, is_causal, window)
    expected = attend_by_document(module, query, key, value, *settings, 10)
    monkeypatch.setattr(sys.modules[attend_by_document.__module__], "_takes_several_lengths", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    for longest in (10, None):
        check(attend_by_document(module, query, key, value, *settings, longest), expected)
    assert calls == [10, 20]


@pytest.mark.parametrize("window", [3, 150])
def test_a_window_in_a_long_document(window: int) -> None:
    """Longer than the queries that look through a window together: the mask of the whole says the same."""
    module = torch.nn.Module()
    query, key, value = (torch.randn(1, 2, 403, 8, dtype=torch.float64) for _ in range(3))
    ends = torch.tensor([0, 400, 403])
    out = attend_by_document(module, query, key, value, ends, 0.3, True, window, None)
    mask = torch.ones(403, 403, dtype=torch.bool).tril().triu(1 - window)
    mask[400:, :400] = False
    check(out, F.scaled_dot_product_attention(query, key, value, mask, scale=0.3).transpose(1, 2))


def ends(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": (
        {"input_ids": torch.ones(2, 9, dtype=torch.long)},
        r"of one row begin, \(1, N\), got a batch of \(2, 9\)",
    ),
    "back again": ({"cu_seq_lens_q": ends(0, 7, 4, 9)}, "without decreasing"),
    "not whole": ({"cu_seq_lens_q": torch.tensor([0.0, 9.0])}, r"int32 or int64, got \(2\) torch.float32"),
    "other keys": (
        {"cu_seq_lens_k": ends(0, 5, 9)},
        r"cu_seq_lens_k must be cu_seq_lens_q, \[0, 4, 9\], got \[0, 5, 9\]\.$",
    ),
    "keys alone": ({"cu_seq_lens_q": None, "cu_seq_lens_k": ends(0, 9)}, "cu_seq_lens_q must be a tensor"),
    "a list of keys": ({"cu_seq_lens_k": [0, 4, 9]}, r"cu_seq_lens_k must be a tensor or None, got list\.$"),
    "a cache": ({"past_key_values": DynamicCache()}, "go without a cache, got a DynamicCache"),
    "a mask": ({"attention_mask": torch.ones(1, 9)}, "go without attention_mask, got a Tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense(case: str) -> None:
    changes, message = REFUSED[case]
    arguments = {"input_ids": torch.ones(1, 9, dtype=torch.long), "cu_seq_lens_q": ends(0, 4, 9)} | changes
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make("diff")(**arguments)
    assert "\n" not in str(error.value)
