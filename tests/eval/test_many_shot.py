"""Many-shot classification on a model that counts, and on tiny models through the whole protocol."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from diff_transformer.data import LabelledText, ManyShotBatches, byte_tokenizer
from diff_transformer.eval.labels import label_log_likelihoods, label_trie
from diff_transformer.eval.many_shot import (
    MANY_SHOT,
    episode_answers,
    labelled_answers,
    order_accuracies,
    orders,
    shots_records,
)
from diff_transformer.eval.measures import Subject
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

TASK = ManyShotBatches(classes=3, labels=3, words=6, item_length=1, noise=0.0)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


class Counter(LlamaForCausalLM):
    """Answers a word with the label that followed it most often, or, where `forgets`, followed it first."""

    forgets = False

    def forward(self, input_ids: Tensor, past_key_values: DynamicCache, use_cache: bool) -> Any:  # type: ignore[override]
        assert use_cache
        keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        keys[:, 0, :, 0] = input_ids
        seen, _ = past_key_values.update(keys, keys, 0)
        rows = seen[:, 0, :, 0].long()
        logits = torch.zeros(*input_ids.shape, 9)
        for row, tokens in enumerate(rows.tolist()):
            labels = [label for word, label in zip(tokens[:-1:2], tokens[1::2], strict=False) if word == tokens[-1]]
            for label in labels[:1] if self.forgets else labels:
                logits[row, -1, label] += 1
        return type("Output", (), {"logits": logits})()


@pytest.fixture
def counter() -> Counter:
    return Counter(LlamaConfig(vocab_size=9, **SIZES)).eval()


def test_a_model_that_counts_is_right(counter: Counter) -> None:
    episode = TASK.episode(0, 0, shots=60, queries=30, noise=0.0)
    assert episode_answers(counter, episode).all()
    records = shots_records(counter, TASK, "it", shots=(1, 60), noises=(0.0, 0.3), episodes=6, queries=10)
    found = {record.group: record.value for record in records}
    assert found["noise 0, 60 shots"] == 1
    assert found["noise 0, 1 shots"] < 0.9
    assert found["noise 0.3, 60 shots"] > 0.8
    assert all(record.n == 60 and len(record.documents) == 6 and record.better == "higher" for record in records)


def test_orders_matter_to_one_that_forgets(counter: Counter) -> None:
    """Two equal wrong labels in three cannot outvote; but whoever goes by the first one depends on the order."""
    settings: dict[str, Any] = {"shots": 30, "noise": 0.3, "kind": "random", "count": 12, "queries": 60, "seed": 1}
    steady = order_accuracies(counter, TASK, **settings)
    counter.forgets = True
    forgetful = order_accuracies(counter, TASK, **settings)
    assert len(steady) == len(forgetful) == 12
    assert max(steady) - min(steady) <= 6  # ties are broken by the label's number, whatever the order
    assert max(forgetful) - min(forgetful) > 15


def test_orders() -> None:
    classes = torch.tensor([0, 0, 1, 2, 1, 0, 2, 0])
    random = orders(classes, 20, "random", seed=0)
    alternating = orders(classes, 20, "alternating", seed=0)
    for found in (random, alternating):
        assert len({tuple(order.tolist()) for order in found}) == 20
        assert all(sorted(order.tolist()) == list(range(8)) for order in found)
    for order in alternating:
        shown = classes[order].tolist()
        assert set(shown[:3]) == {0, 1, 2}
        assert shown[:3] == shown[3:6]
        assert shown[6:] == [0, 0]
    assert len({tuple(classes[order][:3].tolist()) for order in alternating}) > 2
    assert len(orders(torch.tensor([0, 1]), 20, "random", seed=0)) == 2
    with pytest.raises(ValueError, match="got 'sorted'"):
        orders(classes, 2, "sorted", 0)


QUESTIONS = LabelledText(
    "trec",
    train=tuple((f"what is {n} ?", ("number", "entity", "number two")[n % 3]) for n in range(9)),
    test=tuple((f"who is {n} ?", ("number", "entity", "number two")[n % 3]) for n in range(6)),
    labels=("entity", "number", "number two"),
    input_name="Question",
    label_name="Type",
)


@pytest.fixture(params=["diff", "llama"])
def reader(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 257, "max_position_embeddings": 512, "initializer_range": 0.3, **SIZES}
    if request.param == "diff":
        return DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def test_labelled_answers_equal_those_of_whole_prompts(reader: Any) -> None:
    """The prompt of shared demonstrations, read once, against the whole text of each question."""
    tokenizer = byte_tokenizer()
    trie = label_trie(lambda text: tokenizer.encode(text), QUESTIONS.labels)
    right = labelled_answers(reader, tokenizer, QUESTIONS, shots=4, queries=6, seed=2, exact=True)
    greedy = labelled_answers(reader, tokenizer, QUESTIONS, shots=4, queries=6, seed=2)
    assert len(right) == len(greedy) == 6

    random = np.random.default_rng(2)
    shown = "".join(QUESTIONS.demonstration(*QUESTIONS.train[n]) for n in random.permutation(9)[:4])
    assert shown.count("\n==\n") == 4
    for number, answer in zip(random.permutation(6)[:6], right, strict=True):
        text, label = QUESTIONS.test[number]
        prompt = torch.tensor(tokenizer.encode(shown + QUESTIONS.query(text)))
        likelihoods = label_log_likelihoods(reader, trie, prompt)[1]
        assert answer == (QUESTIONS.labels[int(likelihoods.argmax())] == label)


def test_the_measure_reads_a_folder(reader: Any, tmp_path: Path) -> None:
    rows = "".join(f"HUM:ind who was {n} ?\nNUM:date when was {n} ?\n" for n in range(6))
    (tmp_path / "train.txt").write_text(rows)
    (tmp_path / "test.txt").write_text(rows)
    options = {**MANY_SHOT.options, "folder": str(tmp_path), "shots": [2, 4], "queries": 5}
    records = MANY_SHOT.measure(Subject(model=reader, arm="it", tokenizer=byte_tokenizer(), options=options))
    assert [(record.name, record.group, record.n) for record in records] == [
        ("many_shot/trec", "2 shots", 5),
        ("many_shot/trec", "4 shots", 5),
    ]


def test_what_is_refused(reader: Any) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="shots is between 1 and the 9 texts of trec, got 10"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=10, queries=1)
    with pytest.raises(ValueError, match="queries is between 1 and the 6 texts of trec, got 0"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=1, queries=0)
    reader.config.max_position_embeddings = 100
    with pytest.raises(ValueError, match=r"9 shots of trec take .* tokens and the model has 100 positions"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=9, queries=1)
    with pytest.raises(ValueError, match="--option folder"):
        MANY_SHOT.measure(Subject(model=reader, arm="it", tokenizer=tokenizer, options=MANY_SHOT.options))
