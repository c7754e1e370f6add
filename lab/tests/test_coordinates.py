import copy
import pickle

import pytest

from diff_lab.coordinates import NO_COORDINATES, Coordinates

LABELS = [
    ({}, ""),
    ({"needles": 4, "queries": 2}, "4 needles, 2 queried"),
    ({"needles": 1, "queries": 1, "depth": 0.25}, "1 needle, 1 queried, depth 25 %"),
    ({"depth": (0.0, 0.2)}, "depth 0–20 %"),
    ({"position": (128, 255)}, "position 128–255"),
    ({"length": "all lengths"}, "all lengths"),
    ({"parameters": 13_100_000_000}, "13.1B"),
    ({"parameters": 130_000, "tokens": 102_400}, "0.13M, 102,400 tokens"),
    ({"learning_rate": 1e-5}, "learning rate 1e-05"),
    ({"noise": 0.1, "shots": 8}, "noise 0.1, 8 shots"),
    ({"orders": "random", "noise": 0}, "random orders, noise 0"),
    ({"examples": 5}, "5-shot"),
    ({"phase": "before training"}, "before training"),
    ({"bits": 8, "granularity": "row"}, "8 bits, per row"),
    ({"rank": 10}, "top-10"),
    ({"part": "a part, of its own"}, "a part, of its own"),
]


@pytest.mark.parametrize(("values", "label"), LABELS, ids=[label for _, label in LABELS])
def test_coordinates_are_told_in_words(values: dict[str, object], label: str) -> None:
    assert Coordinates(values).label == label


def test_coordinates_are_equal_whatever_their_order() -> None:
    one, other = Coordinates(needles=4, depth=[0, 0.5]), Coordinates({"depth": (0, 0.5)}, needles=4.0)
    assert one == other
    assert len({one, other, NO_COORDINATES}) == 2
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert one.without("depth") == Coordinates(needles=4)
    assert Coordinates(one, depth=1.0).position("depth") == 1.0
    assert one.position("depth") == 0.25


@pytest.mark.parametrize("value", [None, True, [1], [1, 2, 3], ["low", "high"], {"a": 1}])
def test_what_is_no_coordinate_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="depth must be a number, a word or two numbers"):
        Coordinates(depth=value)
