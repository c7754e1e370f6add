"""How each request of a batch gets its tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diff_transformer.serve.batch_sampling import Draw, sampling_steps


def request(place: int = 0, **settings: Any) -> Any:
    state = SimpleNamespace(logit_processor_kwargs=settings, position_offset=place)
    return SimpleNamespace(state=state, has_new_token=True)


def chosen(scores: torch.Tensor, requests: list[Any]) -> torch.Tensor:
    """The token of each row, which is the only one that is left."""
    steps = sampling_steps()
    storage = torch.zeros(steps.tensors_required, len(requests) + 2, dtype=torch.int32)
    left = steps(torch.empty(0), scores, steps.prepare_tensor_args(requests, storage))
    assert left.isfinite().sum(-1).tolist() == [1] * len(requests)
    return left.argmax(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    scores = torch.tensor([1.0, -torch.inf, 0.0, 2.0, -3.0])
    count = 4000
    requests = [request(temperature=temperature, seed=seed) for seed in range(count)]
    seen = chosen(scores.expand(count, 5), requests).bincount(minlength=5) / count
    expected = (scores / temperature).softmax(0)
    assert seen[1] == 0
    assert seen.tolist() == pytest.approx(expected.tolist(), abs=4 * 0.5 / count**0.5)


def test_tokens_without_a_seed_are_drawn_anew_each_time() -> None:
    scores = torch.zeros(8, 1000)
    first, second = (chosen(scores, [request(temperature=1.0)] * 8) for _ in range(2))
    assert len(set(first.tolist())) > 4
    assert first.tolist() != second.tolist()


def test_a_seed_draws_another_token_at_each_place_and_the_same_in_any_row() -> None:
    requests = [request(place, temperature=1.0, seed=7) for place in range(20)]
    drawn = chosen(torch.zeros(20, 10_000), requests).tolist()
    assert len(set(drawn)) > 15
    assert chosen(torch.zeros(20, 10_000), requests[::-1]).tolist() == drawn[::-1]


def test_each_request_has_its_own_settings() -> None:
    scores = torch.tensor([[0.0, 3.0, 3.0, 2.9]]).expand(300, 4)
    greedy = request(temperature=0.0, top_p=1.0)
    likeliest = request(temperature=1.0, top_p=0.5)
    free = request(temperature=5.0, top_p=1.0)
    drawn = chosen(scores, [greedy, likeliest, free] * 100).view(100, 3)
    assert set(drawn[:, 0].tolist()) == {1}
    assert set(drawn[:, 1].tolist()) == {1, 2}
    assert set(drawn[:, 2].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1])
def test_no_number_draws_a_token_that_cannot_be(number: int) -> None:
    scores = torch.full((1, 50_000), -torch.inf)
    scores[0, [17, 30_000]] = torch.tensor([0.0, 5.0])
    left = Draw()(scores, torch.tensor([number], dtype=torch.int32))
    assert int(left.argmax()) == (30_000 if number > 1 else 17)


def test_a_temperature_of_almost_0_takes_the_most_likely_token() -> None:
    scores = torch.tensor([[0.0, 3.0, -40.0, 2.9]]).expand(4, 4)
    temperatures = [0.0, 1e-6, 1e-38, 1e-45]
    assert chosen(scores, [request(temperature=temperature) for temperature in temperatures]).tolist() == [1] * 4


def test_a_row_without_numbers_ends_no_other() -> None:
    scores = torch.tensor([[torch.nan] * 4, [0.0, 9.0, 0.0, 0.0]])
    left = Draw()(scores, torch.tensor([5, 2**30], dtype=torch.int32))
    assert int(left[1].argmax()) == 1
