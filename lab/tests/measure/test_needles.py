"""Needles in text and among tokens, on models whose answers are known and on tiny ones through the whole protocol."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diff_lab.data import ManyShotBatches, NeedleBatches, NeedleTask, RetrievalBatches, byte_tokenizer
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.needles import (
    DEPTHS,
    Needles,
    document_attention,
    haystack,
    needle_answers,
)
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, attention_maps
from writing_model import WritingModel

TEXT = " ".join(f"Sentence {n} says little." for n in range(300))
TOKENIZER = byte_tokenizer()
TASK = NeedleTask(TOKENIZER, TEXT, length=520, needles=3, queried=2, digits=3)
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
}


def reads(reply: Callable[[dict[str, str], list[str]], str], positions: int = 600) -> WritingModel:
    """A model that answers with what `reply` makes of the numbers in the context and the cities of the question."""

    def answer(prompt: str) -> str:
        context, _, question = prompt.rpartition("\nWhat")
        lines = [line.split() for line in context.split("\n") if line.startswith("The special magic")]
        hidden = {words[3]: words[-1] for words in lines}
        asked = question.replace("?", " ").replace(",", " ").split()
        return reply(hidden, [city for city in hidden if city in asked])

    return WritingModel(answer, positions)


def test_a_city_counts_when_its_number_is_in_the_answer() -> None:
    documents = TASK.sample(7, seed=0)
    knows = reads(lambda hidden, cities: ", ".join(f"{city} has {hidden[city]}" for city in cities))
    assert needle_answers(knows, TOKENIZER, documents, batch_size=3) == [[True, True]] * 7
    half = reads(lambda hidden, cities: hidden[cities[0]])
    answers = needle_answers(half, TOKENIZER, documents)
    assert all(sorted(row) == [False, True] for row in answers)
    batches = NeedleBatches(None, TASK, TASK, documents=1, vocab_size=257)
    measured = EvalInput(model=half, variant="half", batches=batches, tokenizer=TOKENIZER)
    records = Needles(needles=3, samples=3).run(measured)
    values = {(record.name, record.coordinates.label): record.value for record in records}
    assert values["needles/accuracy", "3 needles, 2 queried"] == 0.5
    assert values["needles/joint_accuracy", "3 needles, 2 queried"] == 0.0
    assert len(records) == 2 + len(DEPTHS)
    assert values["needles/accuracy_by_depth", "3 needles, 2 queried, depth 25 %"] == 0.5
    assert records[0].n == 3 * len(DEPTHS) * 2


def test_listing_all_numbers_does_not_fit_into_an_answer() -> None:
    """Of many needles: an answer has room for the numbers that are asked for and a few tokens more."""
    task = NeedleTask(TOKENIZER, TEXT, length=1100, needles=9, queried=1, digits=7)
    lists = reads(lambda hidden, cities: " ".join(sorted(hidden.values())), positions=1200)
    answers = needle_answers(lists, TOKENIZER, task.sample(12, seed=0))
    assert 0 < sum(row[0] for row in answers) < 12


def test_a_document_that_is_too_long() -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 300}))
    with pytest.raises(ValueError, match="tokens and the model 300 positions"):
        needle_answers(model, TOKENIZER, TASK.sample(2, seed=0))


@torch.no_grad()
def test_attention_to_the_numbers() -> None:
    """Of every query by itself, on the maps that the model gives: the question is no noise, nor the asked needle."""
    torch.manual_seed(0)
    sizes = {**SIZES, "initializer_range": 0.3}
    model, documents = DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).eval(), TASK.sample(2, seed=0)
    mass = document_attention(model, documents)
    for row, document in enumerate(documents):
        maps = torch.stack([layer.difference for layer in attention_maps(model, torch.tensor([document.tokens]))])
        parts = zip(document.query_positions, document.answer_spans, document.needle_spans, strict=True)
        for number, (query, answer, needle) in enumerate(parts):
            assert TOKENIZER.decode(document.tokens[slice(*answer)]) in document.numbers
            weights, sizes_of = maps[:, 0, :, query], maps[:, 0, :, query].abs()
            noise = [place for place in range(document.context_length) if place not in range(*needle)]
            expected = [
                weights[..., slice(*answer)].sum(-1),
                sizes_of[..., slice(*answer)].sum(-1) / sizes_of.sum(-1),
                weights[..., noise].sum(-1),
                sizes_of[..., noise].sum(-1) / sizes_of.sum(-1),
            ]
            torch.testing.assert_close(mass[row, number], torch.stack(expected).mean((1, 2)))


class Knows(torch.nn.Module):
    """Predicts the token after next: where a key is asked for, its answer stands there; but not for the first query."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.vocab_size, self.context_length = vocab_size, context_length

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        following = input_ids.roll(-1, dims=1)
        following[:, self.context_length + 1] = 0
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, self.vocab_size).float())


def test_token_needles() -> None:
    task = RetrievalBatches(4, 60, num_queries=4, num_keys=8, num_values=8).asking(3, 2)
    assert (task.num_pairs, task.num_queries, task.context_length) == (3, 2, 48)
    measured = EvalInput(model=Knows(task.vocab_size, 48), variant="it", batches=task, seed=2)
    # Ten sequences for each of five depths.
    records = Needles(needles=3, queried=2, samples=10).run(measured)
    values = {(record.name, record.coordinates.label): record.value for record in records}
    assert values["needles/accuracy", "3 needles, 2 queried"] == 0.5
    assert values["needles/joint_accuracy", "3 needles, 2 queried"] == 0.0
    by_depth = [record for record in records if record.name == "needles/accuracy_by_depth"]
    assert sum(record.n or 0 for record in by_depth) == 50  # the first query of each sequence
    assert all(record.value == 0 for record in by_depth)


def test_text_and_tokens_are_told_apart() -> None:
    with pytest.raises(ValueError, match="in text or among the tokens of the retrieval task"):
        Needles().run(EvalInput(model=None, variant="it", batches=ManyShotBatches()))


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_the_measures_run_on_the_data_of_a_run(kind: str) -> None:
    torch.manual_seed(0)
    ends = {"pad_token_id": 256, "eos_token_id": 256}
    if kind == "diff":
        model: Any = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, **ends)).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **ends)).eval()
    batches = NeedleBatches(None, TASK, TASK, documents=1, vocab_size=257)
    options = {"needles": 2, "queried": 1, "length": 420, "samples": 1}
    measured = EvalInput(model=model, variant="it", batches=batches, tokenizer=TOKENIZER, seed=4)
    records = MeasurementRequest(name="needles", options=options).run(measured)
    assert [record.value for record in records] == [0.0] * (2 + len(DEPTHS))
    if kind == "diff":
        first, *others = MeasurementRequest(name="needle_attention", options=options).run(measured)
        assert (first.name, first.value) == ("needles/attention_task_accuracy", 0.0)
        depths = [f"depth {depth} %" for depth in (0, 25, 50, 75, 100)]
        assert {(record.name, record.coordinates.label) for record in others} == {
            (f"needles/attention_{kind}_{definition}", depth)
            for kind in ("to_answer", "noise")
            for definition in ("share", "signed")
            for depth in depths
        }
        assert {(record.n, record.seed) for record in others} == {(1, 4)}
        assert {record.better for record in others if "noise" in record.name} == {"lower"}


def test_a_haystack_is_the_blocks_text() -> None:
    tokens = TOKENIZER.encode("abcdefgh")

    class Blocks:
        def validation_batches(self) -> Any:
            yield {"input_ids": torch.tensor([tokens[:4], tokens[3:7]])}
            yield {"input_ids": torch.tensor([[tokens[6], 256, tokens[7], 256]])}

    assert haystack(Blocks(), TOKENIZER) == "abcdefgh"  # type: ignore[arg-type]  # a stand-in
