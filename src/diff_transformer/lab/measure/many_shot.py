"""Measures many-shot classification of synthetic words, and how much order matters in it (Figures 6 and 7)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache

from diff_transformer.data import Episode, ManyShotBatches
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.accuracy import share_record
from diff_transformer.lab.measure.measurement import (
    Count,
    Counts,
    EvalInput,
    Measurement,
    Numbers,
    Options,
    check_counts,
)
from diff_transformer.lab.record import Baseline, Better, Interval, Result
from diff_transformer.lab.statistics import mean_interval, variance_beyond_chance

ACCURACY = "many_shot/accuracy"
ORDER_VARIANCE, ORDER_MEAN = "many_shot/order_variance", "many_shot/order_mean"
ORDERS = ("random", "alternating")
# The best less the worst grows with the number of orders: the paper has ten.
RANGE_ORDERS = 10


@torch.no_grad()
def episode_answers(model: Any, episode: Episode, order: Tensor | None = None) -> Tensor:
    """Which queries get their right label, the most likely of the episode's labels: (Q,) boolean.

    The demonstrations are read once, and every query after them.

    Args:
        model: a causal language model of transformers in evaluation mode, with a cache.
        episode: demonstrations and queries.
        order: (shots,) of the demonstrations; as they were drawn unless given.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=episode.prompt(order)[None].to(model.device), past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(episode.queries))
    logits = model(input_ids=episode.queries.to(model.device), past_key_values=cache, use_cache=True).logits
    chosen = logits[:, -1].cpu()[:, episode.candidates].argmax(-1)
    return episode.candidates[chosen] == episode.answers


def drawn_orders(classes: Tensor, count: int, kind: str, seed: int) -> list[Tensor]:
    """Different orders of demonstrations.

    Args:
        classes: (shots,) the class of each.
        count: how many orders; demonstrations that have no more get fewer.
        kind: "random", or "alternating": one of each class in turn for as long as there are any, the classes in an
            order of their own and each class' demonstrations as well.
        seed: of the drawing.

    Raises:
        ValueError: another kind.
    """
    if kind not in ORDERS:
        raise ValueError(f"The order of demonstrations is {' or '.join(map(repr, ORDERS))}, got {kind!r}.")
    random = np.random.default_rng(seed)
    shown = classes.numpy()
    found: dict[tuple[int, ...], Tensor] = {}
    for _ in range(20 * count):
        order = random.permutation(len(shown))
        if kind == "alternating":
            place_of_class = random.permutation(int(shown.max()) + 1)
            rounds = np.zeros(len(shown), dtype=int)  # of each demonstration, how many of its class come before it
            for number in range(int(shown.max()) + 1):
                mine = order[shown[order] == number]
                rounds[mine] = np.arange(len(mine))
            order = np.lexsort((place_of_class[shown], rounds))
        found.setdefault(tuple(order.tolist()), torch.from_numpy(order))
        if len(found) == count:
            break
    return list(found.values())


def shots_records(
    model: Any,
    task: ManyShotBatches,
    variant: str,
    *,
    shots: Sequence[int],
    noises: Sequence[float],
    episodes: int = 64,
    queries: int = 16,
    seed: int = 0,
) -> list[Result]:
    """Accuracy by the number of demonstrations and the share of wrong labels among them (Figure 6).

    The queries of an episode share its demonstrations, so the interval is over episodes.

    Args:
        model: trained on `task`, in evaluation mode.
        task: draws the episodes.
        variant: what to call the model in the records.
        shots: numbers of demonstrations.
        noises: shares of labels drawn from all classes.
        episodes, queries: episodes for each value, and queries in an episode.
        seed: of the episodes.

    Raises:
        ValueError: a number below 1, or a share outside 0 … 1.
    """
    check_counts(1, shots=min(shots), episodes=episodes, queries=queries)
    check_noises(noises)
    records = []
    for noise in noises:
        for count in shots:
            right = torch.stack(
                [
                    episode_answers(model, task.episode(seed, number, count, queries, noise))
                    for number in range(episodes)
                ]
            )
            records.append(
                share_record(
                    ACCURACY,
                    right,
                    variant=variant,
                    coordinates=Coordinates(noise=noise, shots=count),
                    seed=seed,
                )
            )
    return records


def order_accuracies(
    model: Any,
    task: ManyShotBatches,
    *,
    shots: int,
    noise: float,
    kind: str,
    count: int,
    queries: int,
    seed: int,
    number: int = 0,
) -> list[int]:
    """How many queries are answered right after each order of the same demonstrations; each order has its own queries.

    Args:
        model: trained on `task`, in evaluation mode.
        task: draws the demonstrations.
        shots: how many of them.
        noise: the share of labels drawn from all classes.
        kind, count: of the orders, see `orders`.
        queries: for each order.
        seed, number: of the demonstrations, orders and queries.
    """
    episode = task.episode(seed, number, shots, queries * count, noise)
    found = zip(
        drawn_orders(episode.classes, count, kind, seed),
        episode.queries.split(queries),
        episode.answers.split(queries),
        strict=False,  # there may be fewer orders than asked for
    )
    return [
        int(episode_answers(model, replace(episode, queries=asked, answers=answers), order).sum())
        for order, asked, answers in found
    ]


def order_records(
    model: Any,
    task: ManyShotBatches,
    variant: str,
    *,
    shots: int,
    noises: Sequence[float],
    orders: int,
    queries: int,
    sets: int,
    seed: int = 0,
) -> list[Result]:
    """How accuracies over orders differ (Figure 7), for random and alternating orders, as means over sets.

    The records are "many_shot/order_range", "…_variance", "…_spread" and "…_mean", see `order_results`.

    Args:
        model: trained on `task`, in evaluation mode.
        task: draws the demonstrations.
        variant: what to call the model in the records.
        shots: demonstrations.
        noises: shares of labels drawn from all classes.
        orders: of each set of demonstrations, of either kind.
        queries: for each order.
        sets: of demonstrations.
        seed: of all that is drawn.

    Raises:
        ValueError: fewer than two shots, orders or queries, no sets, or a share outside 0 … 1.
    """
    check_orders(shots=shots, noises=noises, orders=orders, queries=queries, sets=sets)
    records = []
    for noise in noises:
        for kind in ORDERS:
            settings: dict[str, Any] = {"shots": shots, "noise": noise, "kind": kind, "count": orders}
            right = [
                order_accuracies(model, task, **settings, queries=queries, seed=seed, number=number)
                for number in range(sets)
            ]
            place = Coordinates(orders=kind, noise=noise)
            records += order_results(right, queries, "many_shot/order", variant=variant, coordinates=place, seed=seed)
    return records


def order_results(right: Sequence[Sequence[int]], queries: int, name: str, **shared: Any) -> list[Result]:
    """What numbers of right answers after different orders say, as means over sets of demonstrations.

    Of the shares of right answers, "_range" is the best less the worst of the first ten orders, "_variance" the
    variance over orders without what counting so many answers gives by chance, which may be below 0, "_spread" the root
    of the mean variance (0 where that is below 0), "_mean" their mean.

    Args:
        right: for each set, after each of two orders or more.
        queries: after each order, drawn for it alone.
        name: what the records' names begin with.
        shared: other fields of the records.
    """
    shares = [[count / queries for count in row] for row in right]
    columns: dict[str, tuple[list[float], Better]] = {
        "range": ([max(row[:RANGE_ORDERS]) - min(row[:RANGE_ORDERS]) for row in shares], "lower"),
        "variance": ([variance_beyond_chance(row, queries) for row in shares], "lower"),
        "mean": ([fmean(row) for row in shares], "higher"),
    }
    records = {
        column: Result(
            name=f"{name}_{column}",
            value=fmean(values),
            interval=mean_interval(values),
            n=len(values),
            better=better,
            method="Student's t over sets of demonstrations",
            **shared,
        )
        for column, (values, better) in columns.items()
    }
    squared = records["variance"]
    ends = squared.interval
    roots: Interval | None = None if ends is None else (_root(ends[0]), _root(ends[1]))
    spread = replace(squared, name=f"{name}_spread", value=_root(squared.value), interval=roots)
    return [records["range"], squared, spread, records["mean"]]


def _root(variance: float) -> float:
    return math.sqrt(max(0.0, variance))


def check_orders(*, shots: int, noises: Sequence[float], orders: int, queries: int, sets: int) -> None:
    """Raises as `order_records` with the same settings, without a model."""
    check_counts(2, shots=shots, orders=orders, queries=queries)
    check_counts(1, sets=sets)
    check_noises(noises)


def check_noises(noises: Sequence[float]) -> None:
    """Raises ValueError for what is no share."""
    for noise in noises:
        if not 0 <= noise <= 1:
            raise ValueError(f"noises are shares of wrong labels, 0 to 1, got {noise}.")


class EpisodeOptions(Options):
    """How many demonstrations are shown, and how many of them are wrong."""

    shots: Counts = Field(default=(8, 16, 32), description="numbers of demonstrations")
    noises: Numbers = Field(default=(0.0, 0.1, 0.3), description="shares of wrong labels, 0 to 1")
    episodes: Count = Field(default=64, description="sets of demonstrations")
    queries: Count = Field(default=32, description="questions after each set")


class EpisodeOrderOptions(Options):
    """In how many orders how many demonstrations are shown."""

    shots: Count = Field(default=32, description="demonstrations")
    noises: Numbers = Field(default=(0.1, 0.3), description="shares of wrong labels, 0 to 1")
    orders: Count = Field(default=30, description="orders of each set of demonstrations")
    queries: Count = Field(default=200, description="questions after each order")
    sets: Count = Field(default=4, description="sets of demonstrations")


def _task(measured: EvalInput, name: str, of_text: str) -> ManyShotBatches:
    if not isinstance(measured.batches, ManyShotBatches):
        raise ValueError(
            f"{name} is measured on many_shot data alone, which the model was not trained on; of a model of text, "
            f"measure {of_text}."
        )
    return measured.batches


def _run_shots(measured: EvalInput, options: EpisodeOptions) -> list[Result]:
    task = _task(measured, "episodes", "many_shot")
    return shots_records(measured.model, task, measured.variant, seed=measured.seed, **dict(options))


def _run_orders(measured: EvalInput, options: EpisodeOrderOptions) -> list[Result]:
    task = _task(measured, "episode_orders", "many_shot_orders")
    return order_records(measured.model, task, measured.variant, seed=measured.seed, **dict(options))


def _guessing(name: str, place: Coordinates, recipe: Any, **more: Any) -> Baseline:
    """What guessing among a sequence's labels gives: an item's class does not depend on how often others are shown, so
    knowing which labels occur gives no more.
    """
    chance = 1 / recipe.data.classes
    return Baseline(name=name, coordinates=place, chance=chance, floor=chance, steps=recipe.train.steps, **more)


def _shots_baselines(options: EpisodeOptions, recipe: Any) -> list[Baseline]:
    places = [Coordinates(noise=noise, shots=shots) for noise in options.noises for shots in options.shots]
    return [_guessing(ACCURACY, place, recipe) for place in places]


def _orders_baselines(options: EpisodeOrderOptions, recipe: Any) -> list[Baseline]:
    baselines = []
    for place in [Coordinates(orders=kind, noise=noise) for noise in options.noises for kind in ORDERS]:
        # A variance of accuracies means nothing in a model whose mean accuracy is that of guessing.
        mean: dict[str, Any] = {"accuracy": ORDER_MEAN, "accuracy_coordinates": place, "is_accuracy": False}
        baselines += [_guessing(ORDER_VARIANCE, place, recipe, **mean), _guessing(ORDER_MEAN, place, recipe)]
    return baselines


EPISODES = Measurement(
    name="episodes",
    description="many-shot classification of synthetic words by the number of shots and of wrong labels (Figure 6)",
    options=EpisodeOptions,
    run=_run_shots,
    needs="recipe",
    check=lambda options, *_: check_noises(options.noises),
    baselines=_shots_baselines,
)
EPISODE_ORDERS = Measurement(
    name="episode_orders",
    description="how much the answers to it depend on the order of the same demonstrations (Figure 7)",
    options=EpisodeOrderOptions,
    run=_run_orders,
    needs="recipe",
    check=lambda options, *_: check_orders(**dict(options)),
    baselines=_orders_baselines,
)
