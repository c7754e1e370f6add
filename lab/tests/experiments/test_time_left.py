"""How many trainings there are, and how long they are said to take."""

import pytest

from diff_lab.experiments.time_left import Cost, ManyTrainings, in_words
from small_experiment import Heard


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Counted(Heard):
    """A progress that remembers what it heard last of all trainings."""

    last: tuple[int, int, str]

    def update_all(self, done: int, total: int, time_left: str) -> None:
        self.last = done, total, time_left


def do(trainings: ManyTrainings, clock: Clock, name: str, last: int, seconds: float, first: int = 1) -> None:
    """Steps, each of which takes so long."""
    run = trainings.run(name)
    run.start(last, "recipe")
    for step in range(first, last + 1):
        clock.now += seconds
        run.update(step, 1.0, 1.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_time_left_follows_from_the_steps_that_were_done(workers: int) -> None:
    clock, heard = Clock(), Counted()
    trainings = ManyTrainings(heard, workers, clock)
    small, large = Cost("small", 1.0, 100), Cost("large", 3.0, 100)
    for cost in (small, small, large, large):
        trainings.expect(cost)
    trainings.plan("a", small)
    trainings.plan("b", large)
    trainings.announce()
    beside = "" if workers == 1 else ", 2 at a time"
    assert heard.messages == [f"4 trainings{beside}; the first steps will tell how long they take."]
    do(trainings, clock, "a", 3, 6.0)
    assert heard.last == (0, 4, ""), "too few steps"
    do(trainings, clock, "a", 50, 6.0, first=4)
    # 50 + 100 steps of 6 s; of the others only their size is known: 200 of 18 s.
    left = 150 * 6 + 200 * 18
    assert heard.last == (0, 4, f"{in_words(left / workers)} left")
    assert heard.messages[1] == f"About {(196 * 6 + 200 * 18) / workers / 60:.0f} min left for all trainings."
    do(trainings, clock, "b", 100, 12.0)
    trainings.finish("b")
    # Where two go at a time, the last one alone takes longer than half of all.
    assert heard.last == (1, 4, f"{in_words(max((150 * 6 + 100 * 12) / workers, 100 * 12))} left")
    assert heard.runs == ["a", "a", "b"]
    assert len(heard.messages) == 2


def test_the_longest_training_is_the_least_that_it_takes() -> None:
    clock, heard = Clock(), Counted()
    trainings = ManyTrainings(heard, 2, clock)
    trainings.plan("a", Cost("a", 1.0, 1000))
    do(trainings, clock, "a", 100, 1.0)
    assert heard.last == (0, 1, "about 15 min left")


def test_earlier_runs_tell_beforehand_and_more_trainings_may_come() -> None:
    clock, heard = Clock(), Counted()
    trainings = ManyTrainings(heard, 1, clock)
    cost, second = Cost("a", 1.0, 10), Cost("b", 1.0, 10)
    trainings.expect(cost, 2)
    trainings.expect(second)
    trainings.plan("there", cost, earlier=600.0)
    trainings.plan("new", cost)
    trainings.announce()
    assert heard.messages == ["3 trainings, of which 1 is finished; about 20 min left."]
    assert heard.last == (1, 3, "about 20 min left")
    trainings.drop(second)
    trainings.plan("one more rate", cost)
    do(trainings, clock, "new", 10, 30.0)
    assert heard.last == (1, 3, "about 5 min left"), "this command's own speed counts"
    trainings.finish("new")
    assert heard.last == (2, 3, "about 5 min left")
    assert len(heard.messages) == 1


def test_what_was_timed_is_told_with_what_may_come() -> None:
    clock, heard, timed = Clock(), Counted(), []

    def step_seconds(cost: Cost) -> float:
        timed.append(cost.kind)
        clock.now += 6.0
        return 30.0

    trainings = ManyTrainings(heard, 2, clock, step_seconds, may_grow=True)
    for kind in ("a", "b", "c"):
        trainings.expect(Cost(kind, 1.0, 10))
    trainings.announce()
    assert timed == ["a", "b"], "for ten seconds at most"
    assert heard.messages == [
        "3 trainings, 2 at a time; about 8 min left, and more where the best learning rate is the smallest or the "
        "largest tried."
    ]


def test_nothing_is_said_where_all_is_done_and_each_message_once() -> None:
    heard = Counted()
    trainings = ManyTrainings(heard, 1)
    trainings.plan("there", Cost("a", 1.0, 10), earlier=0.0)
    trainings.announce()
    assert heard.messages == []
    for name in ("a", "b"):
        trainings.run(name).tell("1 process (cpu), float32")
    trainings.tell("1 process (cpu), float32")
    assert heard.messages == ["1 process (cpu), float32"]


def test_a_time_is_told_in_words() -> None:
    assert [in_words(seconds) for seconds in (20, 90, 3600, 3 * 3600)] == [
        "less than a minute",
        "about 2 min",
        "about 60 min",
        "about 3.0 h",
    ]
