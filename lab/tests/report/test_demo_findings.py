"""What is said of the demo's curves follows from them, whichever variant is ahead."""

from collections.abc import Sequence

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE
from diff_lab.record import Baseline, Result
from diff_lab.report.demo_findings import learning_sentences, loss_sentences, steps_table

LEVELS = [Baseline(name=ACCURACY_CURVE, chance=0.06, floor=0.34, steps=400)]


def curves(name: str, diff: Sequence[float], softmax: Sequence[float]) -> list[Result]:
    """Both curves, with a validation every 100 steps."""
    return [
        Result(name=name, variant=variant, value=value, seed=0, coordinates=Coordinates(step=100 * number))
        for variant, values in (("softmax", softmax), ("diff", diff))
        for number, value in enumerate(values, 1)
    ]


EARLY, LATE = (0.5, 0.7, 0.9, 0.94), (0.3, 0.4, 0.6, 0.96)


@pytest.mark.parametrize(
    ("diff", "softmax", "said"),
    [
        (
            EARLY,
            LATE,
            [
                "DIFF reaches 50 % after 100 steps, the Transformer after 250 (2.5 times as many).",
                "DIFF reaches 90 % after 300 steps, the Transformer after 383 (1.3 times as many).",
                "At the end the Transformer is ahead: DIFF has 94.0 % and the Transformer 96.0 %. "
                "The curves have crossed.",
            ],
        ),
        (
            LATE,
            EARLY,
            [
                "The Transformer reaches 50 % after 100 steps, DIFF after 250 (2.5 times as many).",
                "The Transformer reaches 90 % after 300 steps, DIFF after 383 (1.3 times as many).",
                "At the end DIFF is ahead: DIFF has 96.0 % and the Transformer 94.0 %. The curves have crossed.",
            ],
        ),
        (
            (0.3, 0.4, 0.4, 0.6),
            (0.3, 0.3, 0.3, 0.35),
            [
                "DIFF reaches 50 % after 350 steps; the Transformer does not within 400.",
                "At the end DIFF is ahead: DIFF has 60.0 % and the Transformer 35.0 %.",
            ],
        ),
        (
            (0.1, 0.2, 0.3, 0.3),
            (0.1, 0.2, 0.3, 0.305),
            [
                "Neither reaches 50 % within 400 steps.",
                "At the end they are equal within a point: DIFF has 30.0 % and the Transformer 30.5 %.",
            ],
        ),
        (
            (0.4, 0.6, 0.8, 0.8),
            (0.4, 0.6, 0.6, 0.6),
            [
                "Both reach 50 % after 150 steps.",
                "DIFF reaches 70 % after 250 steps; the Transformer does not within 400.",
                "At the end DIFF is ahead: DIFF has 80.0 % and the Transformer 60.0 %.",
            ],
        ),
    ],
    ids=["crossed", "the other way round", "one alone", "neither", "both at once"],
)
def test_sentences_on_learning(diff: Sequence[float], softmax: Sequence[float], said: list[str]) -> None:
    assert learning_sentences(curves(ACCURACY_CURVE, diff, softmax), LEVELS) == said


def test_the_table_of_steps_has_the_floor_and_what_is_not_reached() -> None:
    table = steps_table(curves(ACCURACY_CURVE, (0.5, 0.7, 0.8, 0.8), (0.1, 0.3, 0.5, 0.6)), LEVELS)
    assert table is not None
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["34 % (the floor)", "100", "220"],
        ["50 %", "100", "300"],
        ["70 %", "200", "not within 400"],
        ["90 %", "not within 400", "not within 400"],
        ["at the end", "80.0 % after 400", "60.0 % after 400"],
    ]
    assert list(table.head) == ["Accuracy", "Steps of DIFF", "Steps of Transformer"]
    assert steps_table([], LEVELS) is None


def test_sentences_on_losses_say_who_is_behind() -> None:
    records = curves(LOSS_CURVE, (6.0, 5.0, 4.52), (5.5, 4.9, 4.515))
    assert loss_sentences(records, 2048) == [
        "After 100 steps (0.2 million tokens), DIFF's validation loss is 0.50 nats above that of the Transformer.",
        "At the end, after 300 steps (0.61 million tokens), DIFF's validation loss equals that of the Transformer "
        "within 0.01 nats.",
    ]
    records = curves(LOSS_CURVE, (6.0, 4.0), (6.0, 4.25))
    assert loss_sentences(records)[1].endswith(
        "after 200 steps, DIFF's validation loss is 0.25 nats below that of the Transformer."
    )
    assert loss_sentences(curves(LOSS_CURVE, (), ())) == []
    assert loss_sentences(curves(LOSS_CURVE, (float("nan"),), (4.0,))) == []
