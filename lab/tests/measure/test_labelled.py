"""Labelled questions through the whole protocol, on tiny models of ours and of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_lab.data import LabelledText, byte_tokenizer
from diff_lab.measure import many_shot
from diff_lab.measure.decoding import LabelTrie, label_log_likelihoods
from diff_lab.measure.many_shot import (
    ManyShot,
    ManyShotOrders,
    drawn_orders,
    labelled_answers,
    labelled_prompt,
)
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from full_run import short_run

Rows = Sequence[tuple[str, str]]
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
QUESTIONS = LabelledText(
    "trec",
    train=tuple((f"what is {n} ?", ("number", "entity", "number two")[n % 3]) for n in range(9)),
    test=tuple((f"who is {n} ?", ("number", "entity", "number two")[n % 3]) for n in range(6)),
    labels=("entity", "number", "number two"),
    input_name="Question",
    label_name="Type",
)


@pytest.fixture(params=short_run(["diff", "llama", "diffllama"], ["diff"]))
def reader(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 257, "max_position_embeddings": 512, "initializer_range": 0.3, **SIZES}
    if request.param == "diff":
        return DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).eval()
    if request.param == "diffllama":
        return DiffLlamaForCausalLM(DiffLlamaConfig(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options that name a folder, which holds QUESTIONS."""
    monkeypatch.setattr(many_shot, "read_labelled", lambda task, folder: QUESTIONS)
    return {"folder": "here"}


def of_model(model: Any, tokenizer: Any = None, seed: int = 0) -> EvalInput:
    return EvalInput(model=model, variant="it", tokenizer=tokenizer or byte_tokenizer(), seed=seed)


def test_labelled_answers_equal_those_of_whole_prompts(reader: Any) -> None:
    """The prompt of shared demonstrations, read once, against the whole text of each question."""
    shown, questions = QUESTIONS.train[2:6], QUESTIONS.test
    prompt = labelled_prompt(of_model(reader), QUESTIONS, shown, questions)
    right = labelled_answers(reader, prompt, exact=True)
    assert len(labelled_answers(reader, prompt)) == 6
    assert right == of_whole_prompts(reader, shown, questions)


def of_whole_prompts(reader: Any, shown: Rows, questions: Rows) -> list[bool]:
    """Whether the likeliest label is right, after a text that is read from its beginning for each question."""
    tokenizer = byte_tokenizer()
    trie = LabelTrie([tokenizer.encode(f" {label}\n") for label in QUESTIONS.labels])
    before = "".join(QUESTIONS.demonstration(*row) for row in shown)
    assert before.count("\n==\n") == len(shown)
    right = []
    for text, label in questions:
        prompt = torch.tensor(tokenizer.encode(before + QUESTIONS.query(text)))
        likelihoods = label_log_likelihoods(reader, trie, prompt)[1]
        right.append(QUESTIONS.labels[int(likelihoods.argmax())] == label)
    return right


class Listening:
    """The byte tokenizer, and the prompts that it was given: demonstrations, then as many questions."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.bos_token_id = None
        self.prompts: list[tuple[str, list[str]]] = []

    def encode(self, text: str, **options: Any) -> list[int]:
        if text.endswith("\n==\n"):
            self.prompts.append((text, []))
        elif text.endswith("\nType:"):
            self.prompts[-1][1].append(text)
        return list(self.tokenizer.encode(text, **options))


def written(shown: Rows, questions: Rows) -> tuple[str, list[str]]:
    """What a prompt must be in words."""
    return "".join(f"Question: {text}\nType: {label}\n==\n" for text, label in shown), [
        f"Question: {text}\nType:" for text, _ in questions
    ]


def test_fewer_shots_are_the_first_of_more(reader: Any, questions: dict[str, Any]) -> None:
    heard = Listening()
    records = ManyShot(**questions, shots=(2, 4), queries=6, exact=True).run(of_model(reader, heard, seed=2))
    random = np.random.default_rng(2)
    shown = [QUESTIONS.train[n] for n in random.permutation(9)]
    drawn = [QUESTIONS.test[n] for n in random.permutation(6)]
    assert heard.prompts == [written(shown[:count], drawn) for count in (2, 4)]
    for record, count in zip(records, (2, 4), strict=True):
        assert record.value == np.mean(of_whole_prompts(reader, shown[:count], drawn))
        assert (record.n, record.coordinates.label, record.seed) == (6, f"{count} shots", 2)


def test_orders_of_the_same_demonstrations(reader: Any, questions: dict[str, Any]) -> None:
    """Against whole prompts, one for each order and each of its own questions; the statistics written out."""
    heard = Listening()
    measurement = ManyShotOrders(**questions, shots=6, orders=3, queries=5, sets=2, exact=True)
    records = measurement.run(of_model(reader, heard, seed=7))
    prompts, shares = [], np.zeros((2, 2, 3))  # kinds, sets, orders
    for number in range(2):
        random = np.random.default_rng((7, number))
        shown = [QUESTIONS.train[n] for n in random.permutation(9)[:6]]
        classes = torch.tensor([QUESTIONS.labels.index(label) for _, label in shown])
        for row, kind in enumerate(("random", "alternating")):
            for column, order in enumerate(drawn_orders(classes, 3, kind, 7)):
                drawn = [QUESTIONS.test[n] for n in random.integers(6, size=5)]
                ordered = [shown[n] for n in order]
                prompts.append(written(ordered, drawn))
                shares[row, number, column] = np.mean(of_whole_prompts(reader, ordered, drawn))
    assert heard.prompts == prompts
    assert len({before for before, _ in prompts}) == 12
    assert np.ptp(shares, axis=2).any(), "all orders alike would tell nothing"
    chance = (shares * (1 - shares) / 4).mean(2)
    of_sets = {
        "range": np.ptp(shares, axis=2),
        "variance": shares.var(2, ddof=1) - chance,
        "mean": shares.mean(2),
    }
    expected = {}
    for row, kind in enumerate(("random", "alternating")):
        means = {name: values[row].mean() for name, values in of_sets.items()}
        means["spread"] = np.sqrt(max(0, means["variance"]))
        for name, mean in means.items():
            expected[f"many_shot/trec_order_{name}", f"{kind} orders, 6 shots"] = mean
    assert {(r.name, r.coordinates.label): r.value for r in records} == pytest.approx(expected)
    assert [record.better for record in records] == ["lower", "lower", "lower", "higher"] * 2
    assert all((record.n, record.seed) == (2, 7) and record.interval is not None for record in records)


def test_the_measure_reads_a_folder(reader: Any, tmp_path: Path) -> None:
    rows = "text,label\n" + "".join(f"who was {n} ?,human\nwhen was {n} ?,number\n" for n in range(6))
    (tmp_path / "train.csv").write_text(rows)
    (tmp_path / "test.csv").write_text(rows)
    records = ManyShot(folder=str(tmp_path), shots=(2, 4), queries=5).run(of_model(reader))
    assert [(record.name, record.coordinates.label, record.n) for record in records] == [
        ("many_shot/trec", "2 shots", 5),
        ("many_shot/trec", "4 shots", 5),
    ]
    records = ManyShotOrders(folder=str(tmp_path), shots=3, orders=2, queries=4).run(of_model(reader))
    names = ("range", "variance", "spread", "mean")
    assert [record.name for record in records] == [f"many_shot/trec_order_{name}" for name in names] * 2
    assert [record.interval for record in records] == [None] * 8, "one set of demonstrations"
    assert ManyShotOrders.any_model


def test_what_is_refused(reader: Any, questions: dict[str, Any]) -> None:
    def refused(name: str, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            MeasurementRequest(name=name, options={**questions, **options}).run(of_model(reader))

    refused("many_shot", "shots must be between 1 and 9, the texts of trec, got 10", shots=[1, 10], queries=1)
    refused("many_shot", "queries must be between 1 and 6, the texts of trec, got 7", shots=[1], queries=7)
    refused("many_shot", "many_shot cannot take 0 for queries", queries=0)
    enough = {"shots": 3, "orders": 2, "queries": 2, "sets": 1}
    refused("many_shot_orders", "shots must be between 1 and 9, the texts of trec, got 10", **{**enough, "shots": 10})
    for name, count in enough.items():
        least = min(count, 2)
        message = f"many_shot_orders cannot take {least - 1} for {name} .* or equal to {least}"
        refused("many_shot_orders", message, **{**enough, name: least - 1})
    reader.config.max_position_embeddings = 100
    long = r"^9 shots of trec take .* tokens and the model has 100 positions; ask for fewer shots\.$"
    refused("many_shot", long, shots=[1, 9], queries=1)
    refused("many_shot_orders", long, **{**enough, "shots": 9})


@pytest.mark.parametrize("name", ["many_shot", "many_shot_orders"])
def test_what_a_measure_must_be_told(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} reads labelled questions: .* --option folder=FOLDER"):
        MeasurementRequest(name=name).run(of_model(None))
    with pytest.raises(ValueError, match=f"^{name} reads labelled questions as text, and this model has no tokenizer"):
        MeasurementRequest(name=name, options={"folder": "here"}).run(EvalInput(model=None, variant="it"))
