"""Keys and values of few bits: the rounding, where it is put, and what is said of the subtraction."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import RecallBatches
from diff_lab.measure.cache_bits import CHANNEL, PLACES, ROTATED, TOKEN, LowBit, changed_cache, rounded, rounded_at
from diff_lab.measure.measurement import EvalInput
from diff_lab.train import load_recipe
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

KINDS = ["diff", "diff_v2", "diff_grouped", "softmax"]


def model_of(kind: str) -> DiffTransformerForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_noise_heads": 1} if kind == "diff_grouped" else {}
    sizes |= {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DiffTransformerConfig(attention_type=kind, vocab_size=16, initializer_range=0.5, **sizes)
    return DiffTransformerForCausalLM(config).eval()


def by_loops(numbers: list[float], bits: int) -> list[float]:
    low, high = min(numbers), max(numbers)
    levels = [low + (high - low) * level / (2**bits - 1) for level in range(2**bits)]
    return [min(levels, key=lambda level: abs(level - number)) for number in numbers]


@pytest.mark.parametrize("bits", [2, 4])
def test_rounding(bits: int) -> None:
    """Of 6 heads of 8 channels and 40 tokens: groups of 16 channels, of 32 and then 8 tokens."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 40, 8).double()
    by_token, by_channel = (rounded(x, bits, granularity, 4) for granularity in (TOKEN, CHANNEL))
    row = x[0, :, 3].flatten().tolist()
    expected = [number for start in range(0, 48, 16) for number in by_loops(row[start : start + 16], bits)]
    assert by_token[0, :, 3].flatten().tolist() == pytest.approx(expected, abs=1e-12)
    column = x[0, 2, :, 5].tolist()
    assert by_channel[0, 2, :, 5].tolist() == pytest.approx(by_loops(column[:32], bits) + by_loops(column[32:], bits))
    assert torch.equal(rounded(torch.ones(1, 2, 3, 4), bits, TOKEN, 4), torch.ones(1, 2, 3, 4))


def test_rotation_spreads_an_outlier_within_its_map() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 64).double() / 10
    x[..., 1] = 8.0  # ±1 of each of 64 afterwards
    errors = [(rounded(x, 4, granularity, 64) - x).norm() for granularity in (TOKEN, ROTATED)]
    assert errors[1] < errors[0] / 2
    assert (rounded(x, 24, ROTATED, 64) - x).abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_reach_the_model_rounded(kind: str) -> None:
    """As if its projections gave them so: a second pass through the rounded ones changes nothing, whole ones do."""
    model, tokens = model_of(kind), RecallBatches(8, questions=4, tokens=8).sample(3, 0).input_ids
    seen: dict[str, list[Tensor]] = {"keys": [], "values": []}

    def keep(place: Coordinates, keys: Tensor, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
        assert width == 8
        changed = rounded_at(place, keys, values, width)
        for name, before, after in zip(seen, (keys, values), changed, strict=True):
            seen[name].append((after - before).abs().max())
        return changed

    whole = model(tokens).logits
    for part in ("keys", "values"):
        with changed_cache(model, partial(keep, Coordinates(part=part, granularity=TOKEN, bits=3))):
            assert (model(tokens).logits - whole).abs().max() > 1e-3
    changes = {name: [bool(error) for error in errors] for name, errors in seen.items()}
    assert changes == {"keys": [True, True, False, False], "values": [False, False, True, True]}
    assert torch.equal(model(tokens).logits, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_records(kind: str) -> None:
    model = model_of(kind)
    task = RecallBatches(4, questions=2, tokens=8)
    records = LowBit(sequences=4).run(EvalInput(model=model, variant="ours", batches=task))
    costs = {one.coordinates: one.value for one in records if one.name == "low_bit/accuracy_drop"}
    accuracies = {one.coordinates: one.value for one in records if one.name == "low_bit/accuracy"}
    whole = accuracies.pop(Coordinates(bits="whole"))
    assert list(costs) == PLACES
    assert costs == {at: pytest.approx(whole - value) for at, value in accuracies.items()}
    assert {type(one.value) for one in records} == {float}
    sizes = [one.value for one in records if one.name == "low_bit/amplification"]
    assert [size >= 1 for size in sizes] == ([] if kind == "softmax" else [True, True])
    levels = LowBit().baselines(load_recipe("recall"))
    assert {(level.name, level.coordinates) for level in levels} <= {(one.name, one.coordinates) for one in records}


def test_a_cache_of_latents_is_refused() -> None:
    with pytest.raises(ValueError, match="low_bit rounds keys and values; a 'gdla' caches latents instead"):
        LowBit().run(EvalInput(model=model_of("gdla"), variant="ours", batches=RecallBatches(4, questions=2, tokens=8)))
