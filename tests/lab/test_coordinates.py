import pytest

from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.results_files import coordinates_of, translated

# What files of earlier versions say, what it means, and what is told of it now.
OLD = [
    (None, {}, ""),
    ("N4 R2", {"needles": 4, "queries": 2}, "4 needles, 2 queried"),
    ("N1 R1, depth 25 %", {"needles": 1, "queries": 1, "depth": 0.25}, "1 needle, 1 queried, depth 25 %"),
    ("depth 100 %", {"depth": 1.0}, "depth 100 %"),
    ("0–20 %", {"depth": (0.0, 0.2)}, "depth 0–20 %"),
    ("128–255", {"position": (128, 255)}, "position 128–255"),
    ("first 1024", {"first_tokens": 1024}, "first 1024 tokens"),
    ("22 tokens, depth 0 %", {"length": 22, "depth": 0.0}, "22 tokens, depth 0 %"),
    ("all lengths", {"length": "all lengths"}, "all lengths"),
    ("0.02M", {"parameters": 20_000}, "0.02M"),
    ("13.1B", {"parameters": 13_100_000_000}, "13.1B"),
    ("0.13M, 102,400 tokens", {"parameters": 130_000, "tokens": 102_400}, "0.13M, 102,400 tokens"),
    ("1e-05", {"learning_rate": 1e-5}, "learning rate 1e-05"),
    ("noise 0.1, 8 shots", {"noise": 0.1, "shots": 8}, "noise 0.1, 8 shots"),
    ("random orders, noise 0", {"orders": "random", "noise": 0}, "random orders, noise 0"),
    ("alternating orders, 64 shots", {"orders": "alternating", "shots": 64}, "alternating orders, 64 shots"),
    ("5-shot", {"examples": 5}, "5-shot"),
    ("operations 3", {"operations": 3}, "3 operations"),
    ("step 30", {"step": 30}, "step 30"),
    ("before training", {"phase": "before training"}, "before training"),
    ("8 bits per row", {"bits": 8, "granularity": "row"}, "8 bits, per row"),
    ("whole", {"bits": "whole"}, "whole"),
    ("top-10", {"rank": 10}, "top-10"),
    ("median", {"rank": "median"}, "median"),
    ("context × 4", {"context_factor": 4}, "context × 4"),
    ("a part, of its own", {"part": "a part, of its own"}, "a part, of its own"),
]


@pytest.mark.parametrize(("text", "values", "label"), OLD, ids=[str(text) for text, _, _ in OLD])
def test_what_earlier_versions_told_as_text(text: str | None, values: dict[str, object], label: str) -> None:
    coordinates = Coordinates(coordinates_of(text))
    assert coordinates == values
    assert coordinates.label == label


def test_coordinates_are_equal_whatever_their_order() -> None:
    one, other = Coordinates(needles=4, depth=[0, 0.5]), Coordinates({"depth": (0, 0.5)}, needles=4.0)
    assert one == other
    assert len({one, other, NOWHERE}) == 2
    assert one.without("depth") == Coordinates(needles=4)
    assert Coordinates(one, depth=1.0).position("depth") == 1.0
    assert one.position("depth") == 0.25


@pytest.mark.parametrize("value", [None, True, [1], [1, 2, 3], ["low", "high"], {"a": 1}])
def test_what_is_no_coordinate_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="depth must be a number, a word or two numbers"):
        Coordinates(depth=value)


def test_a_file_of_an_earlier_version_has_the_words_of_now() -> None:
    record = {"name": "a/b", "arm": "diff", "value": 1.0, "group": "N4 R2"}
    row = {"name": "a/b", "arm": "diff", "against": "softmax", "group": None, "claimed_by": "us"}
    settings = {
        "asked": {"experiment": "table2", "arms": [{"name": "diff", "overrides": [], "group": "0.02M"}]},
        "arms": [{"name": "diff", "group": None}],
    }
    baseline = {"name": "a/b", "group": "top-1", "accuracy_group": "top-2"}
    old = {"records": [record], "comparisons": [row], "baselines": [baseline], "headline": None, "settings": settings}
    assert translated(old) == {
        "records": [{"name": "a/b", "variant": "diff", "value": 1.0, "coordinates": {"needles": 4, "queries": 2}}],
        "comparisons": [
            {"name": "a/b", "variant": "diff", "against": "softmax", "coordinates": {}, "exploratory": True}
        ],
        "baselines": [{"name": "a/b", "coordinates": {"rank": 1}, "accuracy_coordinates": {"rank": 2}}],
        "headline": None,
        "settings": {
            "request": {
                "experiment": "table2",
                "variants": [{"name": "diff", "overrides": [], "coordinates": {"parameters": 20_000}}],
            },
            "variants": [{"name": "diff", "coordinates": {}}],
        },
    }
    assert translated(translated(old)) == translated(old)
    for content in (None, [], {"records": 1}, {"records": [1], "settings": []}):
        assert translated(content) == content


def test_the_recipes_in_a_demos_settings_have_the_keys_of_now() -> None:
    """A model card compares them with the recipe of the run."""
    old = {"settings": {"seed": 0, "language": {"model": {"start_from": None, "head_dim": 8}}}}
    assert translated(old)["settings"]["language"]["model"] == {"init_from": None, "head_dim": 8}
    assert old["settings"]["language"]["model"] == {"start_from": None, "head_dim": 8}
