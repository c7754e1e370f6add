"""Measures classification after many labelled examples, and how much their order matters (Figures 6 and 7).

`episodes` and `episode_orders` show synthetic words, on models that were trained on such data; `many_shot` and
`many_shot_orders` show labelled texts, such as TREC's, to any language model.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types
from transformers import DynamicCache

from diff_lab.coordinates import Coordinates
from diff_lab.data import Episode, LabelledText, ManyShotBatches, read_labelled
from diff_lab.measure.answers import greedy_label, proportion_record, share_record
from diff_lab.measure.measurement import Count, Counts, EvalInput, Measurement, Several, Shares, Text, data_of
from diff_lab.record import Baseline, Result
from diff_lab.statistics import mean_interval, variance_beyond_chance
from diff_transformer.model.cache import CACHE_NAME

ACCURACY = "many_shot/accuracy"
ORDER_VARIANCE, ORDER_MEAN = "many_shot/order_variance", "many_shot/order_mean"
ORDERS = ("random", "alternating")
RANGE_ORDERS = 10  # as in the paper; the best less the worst grows with their number


def drawn_orders(classes: Tensor, count: int, kind: str, seed: int) -> list[Tensor]:
    """Draw `count` different orders of demonstrations of these classes (shots,), or fewer if there are no more.

    They are "random", or "alternating": one of each class in turn for as long as there are any.
    """
    random = np.random.default_rng(seed)
    shown = classes.numpy()
    orders: dict[tuple[int, ...], Tensor] = {}
    for _ in range(20 * count):
        order = random.permutation(len(shown))
        if kind == "alternating":
            rank_of_class = random.permutation(int(shown.max()) + 1)
            rounds = np.zeros(len(shown), dtype=int)  # of each demonstration, how many of its class come before it
            for number in range(int(shown.max()) + 1):
                of_class = order[shown[order] == number]
                rounds[of_class] = np.arange(len(of_class))
            order = np.lexsort((rank_of_class[shown], rounds))
        orders.setdefault(tuple(order.tolist()), torch.from_numpy(order))
        if len(orders) == count:
            break
    return list(orders.values())


def order_results(
    measured: EvalInput, right: Sequence[Sequence[int]], queries: int, name: str, coordinates: Coordinates
) -> list[Result]:
    """Return the results of numbers of right answers after different orders, as means over sets of demonstrations.

    Of the shares of right answers, "_range" is the best less the worst of the first ten orders, "_variance" the
    variance over orders beyond that of counting so many answers, which may be below 0, "_spread" the root of the mean
    variance (0 if that is below 0), "_mean" their mean. Each order has `queries` of its own.
    """
    shares = [[count / queries for count in row] for row in right]
    variances = [variance_beyond_chance(row, queries) for row in shares]
    columns: dict[str, list[float]] = {
        "range": [max(row[:RANGE_ORDERS]) - min(row[:RANGE_ORDERS]) for row in shares],
        "variance": variances,
        "spread": variances,
        "mean": [fmean(row) for row in shares],
    }
    shared = {"coordinates": coordinates, "n": len(right), "method": "Student's t over sets of demonstrations"}
    records = []
    for column, values in columns.items():
        mean, interval = fmean(values), mean_interval(values)
        if column == "spread":
            mean, low, high = (math.sqrt(max(0.0, variance)) for variance in (mean, *(interval or (0.0, 0.0))))
            interval = interval and (low, high)
        better = "higher" if column == "mean" else "lower"
        records.append(measured.record(f"{name}_{column}", mean, interval=interval, better=better, **shared))
    return records


@torch.no_grad()
def episode_answers(model: Any, episode: Episode, order: Tensor | None = None) -> Tensor:
    """Return which queries get their right label as the most likely of the episode's: (Q,) boolean."""
    cache = DynamicCache(config=model.config)
    model(input_ids=episode.prompt(order)[None].to(model.device), use_cache=True, **{CACHE_NAME: cache})
    cache.batch_repeat_interleave(len(episode.queries))
    logits = model(input_ids=episode.queries.to(model.device), use_cache=True, **{CACHE_NAME: cache}).logits
    chosen = logits[:, -1].cpu()[:, episode.candidates].argmax(-1)
    return episode.candidates[chosen] == episode.answers


def order_accuracies(model: Any, episode: Episode, count: int, kind: str, seed: int) -> list[int]:
    """Count the queries answered right after each of `count` orders; each has its own share of the queries."""
    queries = len(episode.queries) // count
    parts = zip(
        drawn_orders(episode.classes, count, kind, seed),
        episode.queries.split(queries),
        episode.answers.split(queries),
        strict=False,  # there may be fewer orders than asked for
    )
    return [
        int(episode_answers(model, replace(episode, queries=part, answers=answers), order).sum())
        for order, part, answers in parts
    ]


class Episodes(Measurement):
    """Many-shot classification of synthetic words by the number of shots and of wrong labels (Figure 6)."""

    any_model = False

    shots: Counts = Field(default=(8, 16, 32), description="numbers of demonstrations")
    noises: Shares = Field(default=(0.0, 0.1, 0.3), description="shares of wrong labels, 0 to 1")
    episodes: Count = Field(default=64, description="sets of demonstrations")
    queries: Count = Field(default=32, description="questions after each set")

    def run(self, measured: EvalInput) -> list[Result]:
        task = data_of(measured.batches, ManyShotBatches, "many_shot data", "episodes", "many_shot")
        records = []
        for noise, shots in product(self.noises, self.shots):
            drawn = (task.episode(measured.seed, number, shots, self.queries, noise) for number in range(self.episodes))
            right = torch.stack([episode_answers(measured.model, episode) for episode in drawn])
            # The queries of an episode share its demonstrations, so the interval is over episodes.
            records.append(share_record(measured, ACCURACY, right, Coordinates(noise=noise, shots=shots)))
        return records

    def baselines(self, recipe: Any) -> list[Baseline]:
        baselines = []
        for noise, shots in product(self.noises, self.shots):
            best = None
            if noise == 0:
                best = ceiling(shots, recipe.data.words, recipe.data.classes, recipe.data.item_length)
            baselines += [guessing(ACCURACY, Coordinates(noise=noise, shots=shots), recipe, ceiling=best)]
        return baselines


class EpisodeOrders(Measurement):
    """How much the answers to it depend on the order of the same demonstrations (Figure 7)."""

    any_model = False

    shots: Several = Field(default=32, description="demonstrations")
    noises: Shares = Field(default=(0.1, 0.3), description="shares of wrong labels, 0 to 1")
    orders: Several = Field(default=30, description="orders of each set of demonstrations")
    queries: Several = Field(default=200, description="questions after each order")
    sets: Count = Field(default=4, description="sets of demonstrations")

    def run(self, measured: EvalInput) -> list[Result]:
        task = data_of(measured.batches, ManyShotBatches, "many_shot data", "episode_orders", "many_shot_orders")
        seed, queries = measured.seed, self.queries * self.orders
        records = []
        for noise, kind in product(self.noises, ORDERS):
            drawn = (task.episode(seed, number, self.shots, queries, noise) for number in range(self.sets))
            right = [order_accuracies(measured.model, episode, self.orders, kind, seed) for episode in drawn]
            coordinates = Coordinates(orders=kind, noise=noise)
            records += order_results(measured, right, self.queries, "many_shot/order", coordinates)
        return records

    def baselines(self, recipe: Any) -> list[Baseline]:
        baselines = []
        for noise, kind in product(self.noises, ORDERS):
            at = Coordinates(orders=kind, noise=noise)
            # A variance of accuracies means nothing in a model whose mean accuracy is that of guessing.
            mean: dict[str, Any] = {"accuracy": ORDER_MEAN, "accuracy_coordinates": at, "is_accuracy": False}
            baselines += [guessing(ORDER_VARIANCE, at, recipe, **mean), guessing(ORDER_MEAN, at, recipe)]
        return baselines


def guessing(name: str, coordinates: Coordinates, recipe: Any, **fields: Any) -> Baseline:
    """Return the baseline of guessing among a sequence's labels; knowing which ones occur gives no more."""
    chance = 1 / recipe.data.classes
    return Baseline(name=name, coordinates=coordinates, chance=chance, floor=chance, steps=recipe.train.steps, **fields)


def ceiling(shots: int, words: int, classes: int, item_length: int) -> float | None:
    """Compute the accuracy of the best reader of demonstrations that are all labelled right.

    An item of which no word was shown is of the class that has the most words left. None where classes have different
    numbers of words, or where the cases are more than can be counted at once.
    """
    size = words // classes
    if words % classes or (size + 1) ** classes > 10_000:
        return None
    shown = np.indices((size + 1,) * classes)  # words of each class that were shown
    # All demonstrations are of certain words, so many of each class; then, by inclusion and exclusion, of all of them.
    chance = ((shown / size) ** item_length).mean(0) ** shots
    signed = np.array([[(-1) ** (n + k) * math.comb(n, k) for k in range(size + 1)] for n in range(size + 1)])
    for axis in range(classes):
        chance = np.moveaxis(np.tensordot(signed, chance, (1, axis)), 0, axis)
    ways = np.array([math.comb(size, count) for count in range(size + 1)])[shown].prod(0)
    hidden = (1 - shown / size) ** item_length  # the chance that an item of the class has no word that was shown
    return float((ways * chance * (1 - hidden.mean(0) + hidden.max(0) / classes)).sum())


@dataclass(frozen=True)
class LabelledPrompt:
    """Demonstrations (N,), questions and all labels in a model's tokens, and the numbers of the right labels."""

    demonstrations: Tensor
    questions: list[Tensor]
    answers: list[int]
    labels: list[tuple[int, ...]]

    def right(self, model: Any) -> list[bool]:
        """Return which questions get their right label, by greedy decoding along the labels."""
        read = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=self.demonstrations[None].to(model.device), use_cache=True, **{CACHE_NAME: read})
        return [
            greedy_label(model, self.labels, torch.cat((self.demonstrations, question)), copy.deepcopy(read)) == answer
            for question, answer in zip(self.questions, self.answers, strict=True)
        ]


class LabelledMeasurement(Measurement):
    """Which labelled questions are asked."""

    needs = None

    task: Text = Field(default="trec", description="its name: trec, banking77 or any other")
    folder: Text = Field(default="", description="a folder with train.csv and test.csv, columns text and label")
    queries: Count = Field(default=100, description="questions")

    def read(self, measured: EvalInput, name: str, shots: int, queries: int = 0) -> LabelledText:
        """Read the questions. Raises ValueError if they cannot be asked, or are fewer than are to be shown or asked."""
        if not self.folder:
            raise ValueError(
                f"{name} reads labelled questions: name the folder of their files with --option folder=FOLDER, and "
                "which they are with --option task=NAME."
            )
        if measured.tokenizer is None:
            raise ValueError(f"{name} reads labelled questions as text, and this model has no tokenizer.")
        task = read_labelled(self.task, self.folder)
        for what, count, rows in (("shots", shots, task.train), ("queries", queries, task.test)):
            if count > len(rows):
                raise ValueError(f"{what} must be between 1 and {len(rows)}, the texts of {task.name}, got {count}.")
        return task

    def prompt(
        self, measured: EvalInput, task: LabelledText, shown: Sequence[int], asked: Sequence[int]
    ) -> LabelledPrompt:
        """Write demonstrations and questions, by their numbers in the task's two parts, for a model."""
        tokenizer = measured.tokenizer

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        # A label stands after a space, with the end of the line.
        labels = [tuple(encode(f" {label}\n")) for label in task.labels]
        for name, label in zip(task.labels, labels, strict=True):
            if not label or sum(other[: len(label)] == label for other in labels) > 1:
                raise ValueError(f"Label {name!r} must not be empty or begin another label, got the tokens {label}.")
        # Some tokenizers, such as Llama's, begin a text with a token of their own.
        begin = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_token_id]
        demonstrations = "".join(task.demonstration(*task.train[number]) for number in shown)
        prefix = torch.tensor(begin + encode(demonstrations))
        questions = [torch.tensor(encode(task.query(task.test[number][0]))) for number in asked]
        longest = len(prefix) + max(map(len, questions)) + max(map(len, labels))
        positions = measured.model.config.max_position_embeddings
        if longest > positions:
            raise ValueError(
                f"{len(shown)} shots of {task.name} take {longest} tokens and the model has {positions} positions; ask "
                "for fewer shots."
            )
        answers = [task.labels.index(task.test[number][1]) for number in asked]
        return LabelledPrompt(prefix, questions, answers, labels)


class ManyShot(LabelledMeasurement):
    """Labelled questions after many examples, answers held to the labels: records "many_shot/trec" (Figure 6)."""

    shots: Counts = Field(default=(16, 64), description="numbers of examples before a question")

    def run(self, measured: EvalInput) -> list[Result]:
        task = self.read(measured, "many_shot", max(self.shots), self.queries)
        random = np.random.default_rng(measured.seed)
        shown = random.permutation(len(task.train)).tolist()
        asked = random.permutation(len(task.test))[: self.queries].tolist()
        # More demonstrations begin with those that are fewer, and the questions are the same for all.
        prompts = [self.prompt(measured, task, shown[:shots], asked) for shots in self.shots]
        return [
            proportion_record(
                measured,
                f"many_shot/{task.name}",
                prompt.right(measured.model),
                coordinates=Coordinates(shots=shots),
                method="Wilson's score interval over questions after the same demonstrations",
            )
            for shots, prompt in zip(self.shots, tqdm(prompts, desc=task.name, disable=None), strict=True)
        ]


class ManyShotOrders(LabelledMeasurement):
    """How much the answers to them depend on the order of the same examples, random or alternating (Figure 7).

    Each order has questions of its own, drawn with replacement: records "many_shot/trec_order_range" and so on.
    """

    queries: Several = Field(default=100, description="questions")
    shots: Several = Field(default=64, description="examples before a question")
    orders: Several = Field(default=10, description="orders of each set of examples")
    sets: Count = Field(default=1, description="sets of examples")

    def run(self, measured: EvalInput) -> list[Result]:
        task = self.read(measured, "many_shot_orders", self.shots)
        prompts: dict[str, list[list[LabelledPrompt]]] = {kind: [] for kind in ORDERS}
        for number in range(self.sets):
            random = np.random.default_rng((measured.seed, number))
            shown = random.permutation(len(task.train))[: self.shots]
            classes = torch.tensor([task.labels.index(task.train[row][1]) for row in shown])
            for kind, of_sets in prompts.items():
                of_sets.append([])
                for order in drawn_orders(classes, self.orders, kind, measured.seed):
                    asked = random.integers(len(task.test), size=self.queries).tolist()
                    of_sets[-1].append(self.prompt(measured, task, shown[order.numpy()].tolist(), asked))
        records = []
        for kind, of_sets in prompts.items():
            right = [
                [sum(prompt.right(measured.model)) for prompt in of_set]
                for of_set in tqdm(of_sets, desc=kind, disable=None)
            ]
            coordinates = Coordinates(orders=kind, shots=self.shots)
            records += order_results(measured, right, self.queries, f"many_shot/{task.name}_order", coordinates)
        return records
