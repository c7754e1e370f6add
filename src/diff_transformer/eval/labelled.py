"""Labelled questions answered after many others, from files of TREC, Banking-77 and CLINC-150 (Figure 6)."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from diff_transformer.data import LabelledText, read_labelled
from diff_transformer.eval.labels import greedy_labels, label_log_likelihoods, label_trie
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.results import Result, proportion_interval


@torch.no_grad()
def labelled_answers(
    model: Any,
    tokenizer: Any,
    task: LabelledText,
    *,
    shots: int,
    queries: int,
    seed: int = 0,
    order: Sequence[int] | None = None,
    exact: bool = False,
) -> list[bool]:
    """Which questions get their right label after many labelled ones (Figure 6).

    Args:
        model: a causal language model of transformers in evaluation mode, with a cache.
        tokenizer: its tokenizer.
        task: the labelled questions.
        shots: demonstrations, drawn at random from the training part.
        queries: questions, drawn at random from the test part.
        seed: of the drawing.
        order: of the demonstrations.
        exact: whether the label of the highest constrained likelihood is taken, or what greedy decoding along the
            labels finds.

    Raises:
        ValueError: more shots or queries than there are texts, or a prompt longer than the model's positions.
    """
    for name, asked, rows in (("shots", shots, task.train), ("queries", queries, task.test)):
        if not 1 <= asked <= len(rows):
            raise ValueError(f"{name} is between 1 and the {len(rows)} texts of {task.name}, got {asked}.")
    random = np.random.default_rng(seed)
    shown = [task.train[number] for number in random.permutation(len(task.train))[:shots]]
    asked_for = [task.test[number] for number in random.permutation(len(task.test))[:queries]]
    shown = shown if order is None else [shown[number] for number in order]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    trie = label_trie(encode, task.labels)
    begin = [] if tokenizer.bos_token_id is None or not encode_adds_beginning(tokenizer) else [tokenizer.bos_token_id]
    prefix = torch.tensor(begin + encode("".join(task.demonstration(*row) for row in shown)))
    tails = [torch.tensor(encode(task.query(text))) for text, _ in asked_for]
    longest = len(prefix) + max(map(len, tails)) + trie.depth
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"{shots} shots of {task.name} take {longest} tokens and the model has "
            f"{model.config.max_position_embeddings} positions; ask for fewer shots."
        )
    read = DynamicCache(config=model.config)
    model(input_ids=prefix[None].to(model.device), past_key_values=read, use_cache=True)
    right = []
    for tail, (_, label) in zip(tails, asked_for, strict=True):
        prompt, cache = torch.cat((prefix, tail)), copy.deepcopy(read)
        if exact:
            found = int(label_log_likelihoods(model, trie, prompt, cache)[1].argmax())
        else:
            found = greedy_labels(model, trie, prompt[None], cache=cache)[0]
        right.append(task.labels[found] == label)
    return right


def encode_adds_beginning(tokenizer: Any) -> bool:
    """Whether the tokenizer begins a text with a token of its own, as Llama's does."""
    ids = tokenizer.encode("")
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def labelled_record(right: Sequence[bool], name: str, arm: str, group: str, seed: int) -> Result:
    """Accuracy with Wilson's interval over questions; they share their demonstrations."""
    return Result(
        name=name,
        arm=arm,
        value=sum(right) / len(right),
        interval=proportion_interval(sum(right), len(right)),
        n=len(right),
        group=group,
        seed=seed,
        better="higher",
        method="Wilson's score interval over questions after the same demonstrations",
    )


def _measure(subject: Subject) -> list[Result]:
    options = subject.options
    if options["folder"] is None:
        raise ValueError(
            "many_shot reads labelled questions: name the folder of their files with --option folder=FOLDER, and "
            "which they are with --option task=NAME."
        )
    task = read_labelled(options["task"], options["folder"])
    records = []
    for shots in options["shots"]:
        right = labelled_answers(
            subject.model,
            subject.tokenizer,
            task,
            shots=shots,
            queries=options["queries"],
            seed=subject.seed,
            exact=options["exact"],
        )
        records.append(labelled_record(right, f"many_shot/{task.name}", subject.arm, f"{shots} shots", subject.seed))
    return records


MANY_SHOT = Measure(
    shows="labelled questions after many examples, answers held to the labels: trec, trec-fine, banking77, clinc150",
    measure=_measure,
    needs=None,
    any_model=True,
    options={"task": "trec", "folder": None, "shots": [16, 64], "queries": 100, "exact": False},
)
