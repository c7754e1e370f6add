"""The numbers and pictures of heads, against loops over the maps of `attention_maps`; the binary form of maps."""

import base64

import pytest
import torch
from torch import Tensor

from decoded_maps import decode_maps
from diff_transformer import attention_maps
from diff_transformer.explorer import Answer, ExploredModel, LambdaSettings
from diff_transformer.explorer.trace import HeadMaps, encode_maps, head_numbers, pictures_of
from explored_models import make
from tiny_model import DIFFERENTIAL

TOKENS = [3, 7, 1, 12, 7, 9, 3, 7, 20, 11, 3, 5]


def pictures(explored: ExploredModel, tokens: list[int], size: int) -> Tensor:
    numbers = head_numbers(explored.trace(tokens), explored.layers, explored.heads, None, size)
    data = torch.frombuffer(bytearray(base64.b64decode(numbers["pictures"])), dtype=torch.int8)
    return data.view(explored.layers, explored.heads, numbers["picture_size"], numbers["picture_size"]).int()


@pytest.mark.parametrize(("kind", "factor"), [*((kind, 1.0) for kind in DIFFERENTIAL), ("diff", -0.5)])
def test_numbers_of_heads(kind: str, factor: float) -> None:
    explored = ExploredModel(make(kind), kind)
    trace = explored.trace(TOKENS, LambdaSettings(factor=factor))
    numbers = head_numbers(trace, explored.layers, explored.heads, Answer(10, 3, 5), 32)
    for layer in range(explored.layers):
        maps = trace.maps.of(layer, slice(None))
        for head, (first, left) in enumerate(zip(maps.first, maps.difference, strict=True)):
            removed = [
                sum(min(a.item(), max(0.0, (a - d).item())) for a, d in zip(first[i], left[i], strict=True))
                for i in range(len(TOKENS))
            ]
            assert numbers["removed"][layer][head] == pytest.approx(sum(removed) / len(removed), abs=1e-6)
            row = left[10].abs()
            share = (row[3:5].sum() / row.sum()).item()
            assert numbers["on_answer"][layer][head] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize(("length", "size"), [(12, 32), (41, 16)])
def test_the_picture_of_a_long_text_has_the_brightest_weight_of_each_pixel(length: int, size: int) -> None:
    """Also where the last pixels have fewer rows and columns."""
    model = make("diff", max_position_embeddings=256)
    tokens = torch.randint(0, 29, (1, length), generator=torch.Generator().manual_seed(3))
    pixel = -(-length // size)
    shown = pictures(ExploredModel(model, "diff"), tokens[0].tolist(), size)
    side = -(-length // pixel)
    assert shown.shape[2:] == (side, side)
    assert not pictures_of(torch.zeros(1, 3, 3)).any()
    for layer, maps in enumerate(attention_maps(model, tokens)):
        for head, weights in enumerate(maps.difference[0]):
            brightest = torch.zeros(side, side, dtype=weights.dtype)
            for i in range(length):
                for j in range(i + 1):
                    if weights[i, j].abs() > brightest[i // pixel, j // pixel].abs():
                        brightest[i // pixel, j // pixel] = weights[i, j]
            scale = brightest[side // 4 :].abs().max()
            expected = (brightest.sign() * (brightest.abs() / scale).clamp(max=1).sqrt() * 127).round()
            assert (shown[layer, head] - expected).abs().max() <= 1


def round_trip(maps: HeadMaps, first_row: int) -> HeadMaps:
    decoded, row = decode_maps(encode_maps(maps, first_row))
    assert row == first_row
    return decoded


def close(decoded: Tensor | None, maps: Tensor | None) -> None:
    assert decoded is not None
    assert maps is not None
    torch.testing.assert_close(decoded.double(), maps, rtol=2**-11, atol=3e-8)


@pytest.mark.parametrize("first_row", [0, 4, 11])
def test_the_binary_form_of_maps(first_row: int) -> None:
    trace = ExploredModel(make("diff_v2"), "v2").trace(TOKENS)
    maps = trace.maps.of(1, slice(2, 3), first_row)
    decoded = round_trip(maps, first_row)
    close(decoded.first, maps.first)
    close(decoded.second, maps.second)
    torch.testing.assert_close(decoded.lam, None if maps.lam is None else maps.lam.float())
    single = round_trip(HeadMaps(maps.first, None, None), first_row)
    close(single.first, maps.first)
    assert single.second is None
