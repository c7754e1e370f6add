"""Levels without retrieval are what simulated models get that bind nothing."""

import random
from collections import Counter
from statistics import fmean

import pytest

from diff_lab.data.retrieval_task import most_frequent
from diff_lab.measure.answers import token_levels

DRAWS = 5_000


def answered(pairs: int, queries: int, values: int, *, repeats: bool, eliminate: bool) -> list[list[bool]]:
    """Which queries a player answers right that sees all values of the context, and no key with its value."""
    stream = random.Random(0)
    answers = []
    for _ in range(DRAWS):
        drawn = [stream.randrange(values) for _ in range(pairs)]
        queried = stream.choices(range(pairs), k=queries) if repeats else stream.sample(range(pairs), queries)
        right, revealed = [], dict[int, int]()
        for key in queried:
            left = Counter(drawn)
            if eliminate:
                left.subtract(revealed.values())
            guess = revealed[key] if eliminate and key in revealed else left.most_common(1)[0][0]
            right.append(guess == drawn[key])
            revealed[key] = drawn[key]
        answers.append(right)
    return answers


@pytest.mark.parametrize(
    ("pairs", "queries", "values", "repeats"),
    [(2, 2, 16, False), (4, 2, 16, False), (8, 8, 64, False), (3, 6, 4, True), (64, 3, 8, False)],
)
def test_levels_of_tokens(pairs: int, queries: int, values: int, repeats: bool) -> None:
    levels = token_levels(pairs, queries, values, repeats=repeats)
    assert levels["chance"] == 1 / values
    for eliminate, name in ((False, "floor"), (True, "by_elimination")):
        rows = answered(pairs, queries, values, repeats=repeats, eliminate=eliminate)
        assert levels[name] == pytest.approx(fmean(right for row in rows for right in row), abs=0.015)


def test_one_value_in_the_context_is_known_and_one_query_leaves_nothing_out() -> None:
    assert token_levels(1, 1, 16) == {"chance": 1 / 16, "floor": 1.0, "by_elimination": None}
    # Without coincidences a value of the context is right in 1/N of the cases, half of them for two needles.
    assert most_frequent(2, 10**9) == pytest.approx(1 / 2)
    assert most_frequent(2, 16) == pytest.approx(1 / 2 + 1 / 32)
