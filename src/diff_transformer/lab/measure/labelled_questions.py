"""Asks labelled questions of TREC, Banking-77 and CLINC-150 after many labelled examples (Figures 6 and 7)."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types
from transformers import DynamicCache

from diff_transformer.data import LabelledText, read_labelled
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.decoding import LabelTrie, greedy_labels, label_log_likelihoods, label_trie
from diff_transformer.lab.measure.many_shot import ORDERS, drawn_orders, order_results
from diff_transformer.lab.measure.measurement import Count, Counts, EvalInput, Measurement, Options, Text, check_counts
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import proportion_interval

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class LabelledPrompt:
    """Demonstrations and the questions after them, in a model's tokens. All int64.

    Attributes:
        shown: (N,), the demonstrations.
        questions: the tokens of each question.
        answers: their labels' places among the task's.
        trie: of all labels.
    """

    shown: Tensor
    questions: tuple[Tensor, ...]
    answers: tuple[int, ...]
    trie: LabelTrie


def labelled_prompt(model: Any, tokenizer: Any, task: LabelledText, shown: Rows, asked: Rows) -> LabelledPrompt:
    """Write demonstrations and questions for a model.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        task: says how they are written, and which labels there are.
        shown, asked: texts with their labels.

    Raises:
        ValueError: a prompt longer than the model's positions.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    trie = label_trie(encode, task.labels)
    begin = [] if tokenizer.bos_token_id is None or not encode_adds_beginning(tokenizer) else [tokenizer.bos_token_id]
    prefix = torch.tensor(begin + encode("".join(task.demonstration(*row) for row in shown)))
    questions = tuple(torch.tensor(encode(task.query(text))) for text, _ in asked)
    longest = len(prefix) + max(map(len, questions)) + trie.depth
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"{len(shown)} shots of {task.name} take {longest} tokens and the model has "
            f"{model.config.max_position_embeddings} positions; ask for fewer shots."
        )
    return LabelledPrompt(prefix, questions, tuple(task.labels.index(label) for _, label in asked), trie)


@torch.no_grad()
def labelled_answers(model: Any, prompt: LabelledPrompt, *, exact: bool = False) -> list[bool]:
    """Which questions get their right label. The demonstrations are read once, and every question after them.

    Args:
        model: a causal language model of transformers in evaluation mode, with a cache.
        prompt: demonstrations and questions.
        exact: whether the label of the highest constrained likelihood is taken, or what greedy decoding along the
            labels finds.
    """
    read = DynamicCache(config=model.config)
    model(input_ids=prompt.shown[None].to(model.device), past_key_values=read, use_cache=True)
    right = []
    for question, answer in zip(prompt.questions, prompt.answers, strict=True):
        whole, cache = torch.cat((prompt.shown, question)), copy.deepcopy(read)
        if exact:
            found = int(label_log_likelihoods(model, prompt.trie, whole, cache)[1].argmax())
        else:
            found = greedy_labels(model, prompt.trie, whole[None], cache=cache)[0]
        right.append(found == answer)
    return right


def encode_adds_beginning(tokenizer: Any) -> bool:
    """Whether the tokenizer begins a text with a token of its own, as Llama's does."""
    ids = tokenizer.encode("")
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def labelled_record(right: Sequence[bool], name: str, variant: str, coordinates: Coordinates, seed: int) -> Result:
    """Accuracy with Wilson's interval over questions; they share their demonstrations."""
    return Result(
        name=name,
        variant=variant,
        value=sum(right) / len(right),
        interval=proportion_interval(sum(right), len(right)),
        n=len(right),
        coordinates=coordinates,
        seed=seed,
        better="higher",
        method="Wilson's score interval over questions after the same demonstrations",
    )


def labelled_records(
    model: Any,
    tokenizer: Any,
    task: LabelledText,
    variant: str,
    *,
    shots: Sequence[int],
    queries: int,
    exact: bool = False,
    seed: int = 0,
) -> list[Result]:
    """Accuracy by the number of demonstrations (Figure 6): records "many_shot/trec".

    Args:
        model, tokenizer, exact: see `labelled_answers`.
        task: the labelled questions.
        variant: what to call the model in the records.
        shots: numbers of demonstrations, drawn at random from the training part; more begin with those that are fewer.
        queries: questions, drawn at random from the test part; the same for all.
        seed: of the drawing.

    Raises:
        ValueError: more shots or queries than there are texts, or a prompt longer than the model's positions.
    """
    for count in shots:
        _check_texts(task, shots=count, queries=queries)
    random = np.random.default_rng(seed)
    shown = [task.train[number] for number in random.permutation(len(task.train))[: max(shots)]]
    asked = [task.test[number] for number in random.permutation(len(task.test))[:queries]]
    prompts = [labelled_prompt(model, tokenizer, task, shown[:count], asked) for count in shots]
    return [
        labelled_record(
            labelled_answers(model, prompt, exact=exact),
            f"many_shot/{task.name}",
            variant,
            Coordinates(shots=count),
            seed,
        )
        for count, prompt in zip(shots, tqdm(prompts, desc=task.name, disable=None), strict=True)
    ]


def labelled_order_records(
    model: Any,
    tokenizer: Any,
    task: LabelledText,
    variant: str,
    *,
    shots: int,
    orders: int,
    queries: int,
    sets: int = 1,
    exact: bool = False,
    seed: int = 0,
) -> list[Result]:
    """How accuracies over orders of the same demonstrations differ (Figure 7), random ones and such that alternate.

    The records are "many_shot/trec_order_range", "…_variance", "…_spread" and "…_mean", see `order_results`. The
    demonstrations are read anew in each order. Each order has questions of its own, drawn from the test part with
    replacement: shares of right answers then differ by chance as independent ones do, which the variance leaves out.

    Args:
        model, tokenizer, exact: see `labelled_answers`.
        task: the labelled questions.
        variant: what to call the model in the records.
        shots: demonstrations, drawn at random from the training part.
        orders: of each set of demonstrations, of either kind.
        queries: for each order.
        sets: of demonstrations.
        seed: of all that is drawn.

    Raises:
        ValueError: fewer than two shots, orders or queries, no sets, more shots than there are texts, or a prompt
            longer than the model's positions.
    """
    check_counts(2, shots=shots, orders=orders, queries=queries)
    check_counts(1, sets=sets)
    _check_texts(task, shots=shots)
    prompts: dict[str, list[list[LabelledPrompt]]] = {kind: [] for kind in ORDERS}
    for number in range(sets):
        random = np.random.default_rng((seed, number))
        shown = [task.train[place] for place in random.permutation(len(task.train))[:shots]]
        classes = torch.tensor([task.labels.index(label) for _, label in shown])
        for kind in ORDERS:
            prompts[kind].append([])
            for order in drawn_orders(classes, orders, kind, seed):
                asked = [task.test[place] for place in random.integers(len(task.test), size=queries)]
                ordered = [shown[place] for place in order.tolist()]
                prompts[kind][-1].append(labelled_prompt(model, tokenizer, task, ordered, asked))
    records = []
    for kind, of_sets in prompts.items():
        right = [
            [sum(labelled_answers(model, prompt, exact=exact)) for prompt in tqdm(of_set, desc=kind, disable=None)]
            for of_set in of_sets
        ]
        place = Coordinates(orders=kind, shots=shots)
        shared: dict[str, Any] = {"variant": variant, "coordinates": place, "seed": seed}
        records += order_results(right, queries, f"many_shot/{task.name}_order", **shared)
    return records


def _check_texts(task: LabelledText, *, shots: int, queries: int | None = None) -> None:
    for name, count, rows in (("shots", shots, task.train), ("queries", queries, task.test)):
        if count is not None and not 1 <= count <= len(rows):
            raise ValueError(f"{name} is between 1 and the {len(rows)} texts of {task.name}, got {count}.")


class LabelledOptions(Options):
    """Which labelled questions are asked."""

    task: Text = Field(default="trec", description="trec, trec-fine, banking77 or clinc150")
    folder: Text = Field(default="", description="the folder of its files")
    queries: Count = Field(default=100, description="questions")
    exact: bool = Field(default=False, description="whether the likeliest label is taken, not the greedy one")


class ManyShotOptions(LabelledOptions):
    """After how many examples they are asked."""

    shots: Counts = Field(default=(16, 64), description="numbers of examples before a question")


class ManyShotOrderOptions(LabelledOptions):
    """After how many orders of how many examples they are asked."""

    shots: Count = Field(default=64, description="examples before a question")
    orders: Count = Field(default=10, description="orders of each set of examples")
    sets: Count = Field(default=1, description="sets of examples")


def _labelled(measured: EvalInput, options: LabelledOptions, name: str) -> tuple[LabelledText, dict[str, Any]]:
    """The text that the options name, and the other options."""
    if not options.folder:
        raise ValueError(
            f"{name} reads labelled questions: name the folder of their files with --option folder=FOLDER, and "
            "which they are with --option task=NAME."
        )
    if measured.tokenizer is None:
        raise ValueError(f"{name} reads labelled questions as text, and this model has no tokenizer.")
    others = {key: value for key, value in options if key not in ("task", "folder")}
    return read_labelled(options.task, options.folder), others


def _run_shots(measured: EvalInput, options: ManyShotOptions) -> list[Result]:
    task, others = _labelled(measured, options, "many_shot")
    return labelled_records(measured.model, measured.tokenizer, task, measured.variant, seed=measured.seed, **others)


def _run_orders(measured: EvalInput, options: ManyShotOrderOptions) -> list[Result]:
    task, others = _labelled(measured, options, "many_shot_orders")
    return labelled_order_records(
        measured.model, measured.tokenizer, task, measured.variant, seed=measured.seed, **others
    )


MANY_SHOT = Measurement(
    name="many_shot",
    description="labelled questions after many examples, answers held to the labels: trec, trec-fine, banking77, "
    "clinc150",
    options=ManyShotOptions,
    run=_run_shots,
    needs=None,
    any_model=True,
)
MANY_SHOT_ORDERS = Measurement(
    name="many_shot_orders",
    description="how much the answers to them depend on the order of the same examples (Figure 7)",
    options=ManyShotOrderOptions,
    run=_run_orders,
    needs=None,
    any_model=True,
)
