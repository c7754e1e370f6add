"""The numbers and pictures of heads, against loops over the maps of `attention_maps`; the binary form of maps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decoded_maps import decode_maps
from diff_transformer import DiffTransformerForCausalLM, attention_maps
from diff_transformer.explorer import Answer, ExploredModel
from diff_transformer.explorer import trace as head_numbers
from diff_transformer.explorer.trace import HeadMaps, encode_maps
from tiny_model import DIFFERENTIAL

TOKENS = [3, 7, 1, 12, 7, 9, 3, 7, 20, 11, 3, 5]
Make = Callable[..., DiffTransformerForCausalLM]


@pytest.mark.parametrize("kind", DIFFERENTIAL)
def test_numbers_of_heads(make: Make, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whether all rows of a map are in memory at once or one at a time."""
    model = make(kind)
    explored = ExploredModel(model, kind)
    trace = explored.trace(TOKENS)
    answer = Answer(query=10, begin=3, end=5)
    numbers = head_numbers.head_numbers(trace, explored.layers, explored.heads, answer, 32)
    monkeypatch.setattr(head_numbers, "_WEIGHTS_AT_ONCE", 1)
    one_by_one = head_numbers.head_numbers(trace, explored.layers, explored.heads, answer, 32)
    assert torch.equal(numbers.pictures, one_by_one.pictures)
    torch.testing.assert_close(numbers.removed, one_by_one.removed)
    assert numbers.removed is not None
    assert numbers.on_answer is not None
    for layer, maps in enumerate(attention_maps(model, torch.tensor([TOKENS]))):
        assert maps.first is not None
        for head in range(explored.heads):
            first, left = maps.first[0, head], maps.difference[0, head]
            removed = [
                sum(min(a.item(), max(0.0, (a - d).item())) for a, d in zip(first[i], left[i], strict=True))
                for i in range(len(TOKENS))
            ]
            assert numbers.removed[layer, head].item() == pytest.approx(sum(removed) / len(removed), abs=1e-6)
            row = left[10].abs()
            assert numbers.on_answer[layer, head].item() == pytest.approx((row[3:5].sum() / row.sum()).item(), abs=1e-6)
            scale = left[3:].abs().max()
            picture = (left.sign() * (left.abs() / scale).clamp(max=1).sqrt() * 127).round()
            assert (numbers.pictures[layer, head] - picture).abs().max() <= 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4)])
def test_pictures_of_ordinary_heads(make: Make, heads: int, kv_heads: int) -> None:
    """Two are computed at a time, or one where one is asked for; each has the keys of its own group."""
    model = make("softmax", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
    explored = ExploredModel(model, "softmax")
    trace = explored.trace(TOKENS)
    pictures = head_numbers.head_numbers(trace, explored.layers, heads, None, 32).pictures
    for layer, maps in enumerate(attention_maps(model, torch.tensor([TOKENS]))):
        for head, weights in enumerate(maps.difference[0]):
            picture = ((weights / weights[3:].max()).clamp(max=1).sqrt() * 127).round()
            assert (pictures[layer, head] - picture).abs().max() <= 1
            alone = trace.maps.of(layer, slice(head, head + 1), slice(2, 9)).first
            torch.testing.assert_close(alone[0], weights[2:9])


@pytest.mark.parametrize(("length", "size"), [(150, 16), (97, 32), (64, 64), (33, 32)])
def test_the_picture_of_a_long_text_has_the_brightest_weight_of_each_pixel(
    make: Make, monkeypatch: pytest.MonkeyPatch, length: int, size: int
) -> None:
    """However many rows are in memory at once, also where the last pixels have fewer rows and columns."""
    model = make("diff", max_position_embeddings=256)
    tokens = torch.randint(0, 29, (1, length), generator=torch.Generator().manual_seed(3))
    explored = ExploredModel(model, "diff")
    pixel = -(-length // size)
    monkeypatch.setattr(head_numbers, "_WEIGHTS_AT_ONCE", 3 * pixel * length)
    trace = explored.trace(tokens[0].tolist())
    pictures = head_numbers.head_numbers(trace, explored.layers, explored.heads, None, size).pictures
    side = -(-length // pixel)
    assert pictures.shape == (explored.layers, explored.heads, side, side)
    for layer, maps in enumerate(attention_maps(model, tokens)):
        for head in range(explored.heads):
            weights = maps.difference[0, head]
            brightest = torch.zeros(side, side, dtype=weights.dtype)
            for i in range(length):
                for j in range(i + 1):
                    if weights[i, j].abs() > brightest[i // pixel, j // pixel].abs():
                        brightest[i // pixel, j // pixel] = weights[i, j]
            scale = brightest[side // 4 :].abs().max()
            expected = (brightest.sign() * (brightest.abs() / scale).clamp(max=1).sqrt() * 127).round()
            assert (pictures[layer, head] - expected).abs().max() <= 1


def test_a_picture_keeps_what_is_bright_in_a_pixel() -> None:
    rows = torch.zeros(7, 7)
    rows[0, 0], rows[1, 1] = 0.25, -1.0
    rows[6, 5], rows[6, 6] = 0.25, 0.5
    rows[4, 4] = 0.125
    pictures = head_numbers.pictures_of(head_numbers.pooled(rows.unsqueeze(0), 2))
    # The scale ends at 0.5, whatever is larger in the first rows.
    assert pictures[0].tolist() == [[-127, 0, 0, 0], [0] * 4, [0, 0, 64, 0], [0, 0, 90, 127]]
    assert not head_numbers.pictures_of(torch.zeros(1, 3, 3)).any()


def test_a_head_whose_maps_are_equal_removes_lambda() -> None:
    same = torch.rand(2, 5, 5).tril().double()
    same /= same.sum(-1, keepdim=True)
    lam = torch.tensor([[0.4] * 5, [-0.4] * 5]).double()
    removed = head_numbers.removed_weight(same, HeadMaps(same, same, lam).difference)
    assert removed.mean(-1).tolist() == pytest.approx([0.4, 0.0])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"query": 3}, "must be an object"),
        ({"query": 3, "begin": 1.0, "end": 2}, "whole numbers"),
        ({"query": 3, "begin": True, "end": 2}, "whole numbers"),
        ({"query": 3, "begin": 4, "end": 5}, "cannot be seen from token 3"),
        ({"query": 5, "begin": 1, "end": 2}, "a text of 5"),
        ({"query": 3, "begin": 2, "end": 2}, "cannot be seen"),
    ],
)
def test_answers_that_do_not_fit(raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Answer.read(raw, 5)


def round_trip(maps: HeadMaps, first_row: int) -> HeadMaps:
    decoded, row = decode_maps(encode_maps(maps, first_row))
    assert row == first_row
    return decoded


def close(decoded: Tensor | None, maps: Tensor | None) -> None:
    assert decoded is not None
    assert maps is not None
    torch.testing.assert_close(decoded.double(), maps, rtol=2**-11, atol=3e-8)


@pytest.mark.parametrize("first_row", [0, 4, 11])
def test_the_binary_form_of_maps(make: Make, first_row: int) -> None:
    trace = ExploredModel(make("diff_v2"), "v2").trace(TOKENS)
    maps = trace.maps.of(1, slice(2, 3), slice(first_row, None))
    decoded = round_trip(maps, first_row)
    close(decoded.first, maps.first)
    close(decoded.second, maps.second)
    torch.testing.assert_close(decoded.lam, None if maps.lam is None else maps.lam.float())
    single = round_trip(HeadMaps(maps.first, None, None), first_row)
    close(single.first, maps.first)
    assert single.second is None
