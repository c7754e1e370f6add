"""Labelled questions through the whole protocol, on tiny models of ours and of transformers."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from any_model import any_model
from diff_lab.data import LabelledText, byte_tokenizer
from diff_lab.measure.answers import greedy_label
from diff_lab.measure.many_shot import ManyShot, ManyShotOrders, drawn_orders
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from full_run import short_run

Rows = Sequence[tuple[str, str]]
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
LABELS = ("entity", "human", "number")
TRAIN = [(f"what is {n} ?", LABELS[n % 3]) for n in range(9)]
TEST = [(f"who is {n} ?", LABELS[n % 3]) for n in range(6)]


@pytest.fixture(params=short_run(["diff", "llama", "diffllama"], ["diff"]))
def reader(request: pytest.FixtureRequest) -> Any:
    return any_model(request.param, 1, vocab_size=257, max_position_embeddings=512, initializer_range=0.3, **SIZES)


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, Any]:
    """Options that name a folder with the tables of a task."""
    for part, rows in (("train", TRAIN), ("test", TEST)):
        (tmp_path / f"{part}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return {"folder": str(tmp_path)}


def of_model(model: Any, tokenizer: Any = None, seed: int = 0) -> EvalInput:
    return EvalInput(model=model, variant="it", tokenizer=tokenizer or byte_tokenizer(), seed=seed)


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


def written(shown: Rows, asked: Rows) -> tuple[str, list[str]]:
    """What a prompt must be in words."""
    return "".join(f"Question: {text}\nType: {label}\n==\n" for text, label in shown), [
        f"Question: {text}\nType:" for text, _ in asked
    ]


def of_whole_prompts(reader: Any, shown: Rows, asked: Rows) -> list[bool]:
    """Whether the greedy label is right, after a text that is read from its beginning for each question."""
    tokenizer = byte_tokenizer()
    encoded = [tuple(tokenizer.encode(f" {label}\n")) for label in LABELS]
    before, ends = written(shown, asked)
    labels = [LABELS[greedy_label(reader, encoded, torch.tensor(tokenizer.encode(before + end)))] for end in ends]
    return [label == right for label, (_, right) in zip(labels, asked, strict=True)]


def test_fewer_shots_are_the_first_of_more(reader: Any, questions: dict[str, Any]) -> None:
    heard = Listening()
    records = ManyShot(**questions, shots=(2, 4), queries=6).run(of_model(reader, heard, seed=2))
    random = np.random.default_rng(2)
    shown = [TRAIN[n] for n in random.permutation(9)]
    drawn = [TEST[n] for n in random.permutation(6)]
    assert heard.prompts == [written(shown[:count], drawn) for count in (2, 4)]
    for record, count in zip(records, (2, 4), strict=True):
        assert record.value == np.mean(of_whole_prompts(reader, shown[:count], drawn))
        assert (record.name, record.n, record.seed) == ("many_shot/trec", 6, 2)
        assert record.coordinates.label == f"{count} shots"


def test_orders_of_the_same_demonstrations(reader: Any, questions: dict[str, Any]) -> None:
    """Against whole prompts, one for each order and each of its own questions; the statistics written out."""
    heard = Listening()
    measurement = ManyShotOrders(**questions, shots=6, orders=3, queries=5, sets=2)
    records = measurement.run(of_model(reader, heard, seed=7))
    prompts, shares = [], np.zeros((2, 2, 3))  # kinds, sets, orders
    for number in range(2):
        random = np.random.default_rng((7, number))
        shown = [TRAIN[n] for n in random.permutation(9)[:6]]
        classes = torch.tensor([LABELS.index(label) for _, label in shown])
        for row, kind in enumerate(("random", "alternating")):
            for column, order in enumerate(drawn_orders(classes, 3, kind, 7)):
                drawn = [TEST[n] for n in random.integers(6, size=5)]
                ordered = [shown[n] for n in order]
                prompts.append(written(ordered, drawn))
                shares[row, number, column] = np.mean(of_whole_prompts(reader, ordered, drawn))
    assert heard.prompts == prompts
    assert len({before for before, _ in prompts}) == 12
    assert np.ptp(shares, axis=2).any(), "all orders alike would tell nothing"
    of_sets = {
        "range": np.ptp(shares, axis=2),
        "variance": shares.var(2, ddof=1) - (shares * (1 - shares) / 4).mean(2),
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


def test_what_is_refused(reader: Any, questions: dict[str, Any]) -> None:
    def refused(name: str, message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            MeasurementRequest(name=name, options={**questions, **options}).run(of_model(reader))

    refused("many_shot", "shots must be between 1 and 9, the texts of trec, got 10", shots=[1, 10], queries=1)
    refused("many_shot", "queries must be between 1 and 6, the texts of trec, got 7", shots=[1], queries=7)
    enough = {"shots": 3, "orders": 2, "queries": 2, "sets": 1}
    refused("many_shot_orders", "shots must be between 1 and 9, the texts of trec, got 10", **{**enough, "shots": 10})
    for name, count in enough.items():
        least = min(count, 2)
        message = f"many_shot_orders cannot take {least - 1} for {name} .* or equal to {least}"
        refused("many_shot_orders", message, **{**enough, name: least - 1})
    for labels in (("x", "x"), ("x", ""), ("x", "xy")):  # in tokens
        tokenizer = SimpleNamespace(encode=lambda text, labels=labels, **_: labels["n" in text], bos_token_id=None)
        task = LabelledText("trec", (), (), ("human", "other"), "Question", "Type")
        with pytest.raises(ValueError, match=r"^Label '.*' must not be empty or begin another label, got the tokens"):
            ManyShot(**questions).prompt(of_model(reader, tokenizer), task, [], [])
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


# Four labels: one is another's beginning but for its last token, 9, which ends them all.
TOKENS = [(1, 2, 9), (1, 3, 9), (4, 9), (1, 2, 5, 9)]


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_greedy_answers_along_the_labels(kind: str) -> None:
    """As each token by a forward pass without a cache gives, and where the model likes no label's token best."""
    model = any_model(kind, 3, **{**SIZES, "vocab_size": 12, "num_hidden_layers": 2}, initializer_range=0.5)
    model.generation_config.eos_token_id = 9
    for seed in range(5):
        prompt = torch.randint(12, (7,), generator=torch.Generator().manual_seed(seed))
        tokens: tuple[int, ...] = ()
        with torch.no_grad():
            if seed == 4:
                model.lm_head.weight[[1, 2, 3, 4, 5, 9]] *= 1e-3
            while tokens not in TOKENS:
                allowed = [label[len(tokens)] for label in TOKENS if label[: len(tokens)] == tokens]
                row = torch.cat((prompt, torch.tensor(tokens, dtype=torch.long)))
                scores = model(input_ids=row[None], use_cache=False).logits[0, -1]
                tokens += (allowed[int(scores[allowed].argmax())],)
            cache = model(input_ids=prompt[None, :5], use_cache=True).past_key_values
        assert greedy_label(model, TOKENS, prompt) == greedy_label(model, TOKENS, prompt, cache) == TOKENS.index(tokens)
