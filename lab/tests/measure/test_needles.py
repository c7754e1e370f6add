"""Needles in text and among tokens, on models whose answers are known and on tiny ones through the whole protocol."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import diff_lab.measure.retrieval as retrieval
from diff_lab.data import ManyShotBatches, NeedleBatches, NeedleTask, RetrievalBatches, byte_tokenizer
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.needles import (
    DEPTHS,
    Needles,
    attention_records,
    document_attention,
    haystack,
    needle_answers,
)
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

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


class Reader:
    """Answers a prompt with what `reply` makes of its context's needles and its question."""

    device = torch.device("cpu")
    config = SimpleNamespace(max_position_embeddings=600)
    generation_config = SimpleNamespace(eos_token_id=256)

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any) -> Tensor:
        assert not generation_config.do_sample
        new_tokens, rows = generation_config.max_new_tokens, []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            prompt = TOKENIZER.decode(row[mask.bool()])
            context, _, question = prompt.rpartition("\nWhat")
            lines = [line.split() for line in context.split("\n") if line.startswith("The special magic")]
            hidden = {words[3]: words[-1] for words in lines}
            cities = [city for city in hidden if city in question.replace("?", " ").replace(",", " ").split()]
            rows.append([*TOKENIZER.encode(self.reply(hidden, cities)), 256][:new_tokens])
        longest = max(map(len, rows))
        rows = [row + [256] * (longest - len(row)) for row in rows]
        return torch.cat((input_ids, torch.tensor(rows)), dim=1)


def test_a_city_counts_when_its_number_is_in_the_answer() -> None:
    documents = TASK.sample(7, seed=0)
    knows = Reader(lambda hidden, cities: ", ".join(f"{city} has {hidden[city]}" for city in cities))
    assert needle_answers(knows, TOKENIZER, documents, batch_size=3) == [[True, True]] * 7
    half = Reader(lambda hidden, cities: hidden[cities[0]])
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
    lists = Reader(lambda hidden, cities: " ".join(sorted(hidden.values())))
    lists.config = SimpleNamespace(max_position_embeddings=1200)
    answers = needle_answers(lists, TOKENIZER, task.sample(12, seed=0))
    assert 0 < sum(row[0] for row in answers) < 12


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_real_models_answer(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "diff":
        model: Any = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, pad_token_id=256, eos_token_id=256))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=256, eos_token_id=256))
    documents = TASK.sample(2, seed=0)
    assert needle_answers(model.eval(), TOKENIZER, documents) == [[False, False]] * 2
    model.config.max_position_embeddings = 300
    with pytest.raises(ValueError, match="tokens and the model 300 positions"):
        needle_answers(model, TOKENIZER, documents)


def test_attention_to_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head puts 0.1 on each digit of the answer, −0.3 on the needle's first word and 0.2 on the text's last token
    before the question; a second head attends to itself."""
    documents = TASK.sample(3, seed=0)

    def fake(model: Any, input_ids: Tensor) -> list[Tensor]:
        maps = torch.zeros(len(input_ids), 2, input_ids.shape[1], input_ids.shape[1])
        for row, tokens in enumerate(input_ids.tolist()):
            (document,) = [found for found in documents if list(found.tokens) == tokens[: len(found.tokens)]]
            for query, (begin, end), (first, _) in zip(
                document.query_positions, document.answer_spans, document.needle_spans, strict=True
            ):
                assert TOKENIZER.decode(tokens[begin:end]) in document.numbers
                maps[row, 0, query, begin:end] = 0.1
                maps[row, 0, query, first] = -0.3
                maps[row, 0, query, document.context_length] = 0.2  # the question is no noise
                maps[row, 0, query, 0 if first else 30] += 0.2
                maps[row, 1, query, query] = 1
        return [maps] * 2

    monkeypatch.setattr(retrieval, "applied_maps", fake)
    mass = document_attention(torch.nn.Linear(1, 1), documents, batch_size=2)
    expected = {"answer_signed": 0.3, "answer_share": 0.3, "noise_signed": 0.2, "noise_share": 0.2}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(mass, name), torch.full((3, 2), value / 2), msg=name)
    records = attention_records(EvalInput(model=None, variant="diff", seed=4), [("depth 0 %", mass)])
    assert all((record.coordinates.label, record.seed, record.n) == ("depth 0 %", 4, 3) for record in records)
    found: dict[str, Any] = {record.name: (record.value, record.better) for record in records}
    assert found == {
        "needles/attention_to_answer_share": (pytest.approx(0.15), "higher"),
        "needles/attention_to_answer_signed": (pytest.approx(0.15), "higher"),
        "needles/attention_noise_share": (pytest.approx(0.1), "lower"),
        "needles/attention_noise_signed": (pytest.approx(0.1), "lower"),
    }


def test_maps_of_a_real_model() -> None:
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, attention_type="softmax")).eval()
    mass = document_attention(model, TASK.sample(2, seed=0))
    # A softmax is positive and adds up to 1, so both definitions are the same, and most of it is on the context.
    torch.testing.assert_close(mass.answer_signed, mass.answer_share)
    torch.testing.assert_close(mass.noise_signed, mass.noise_share)
    assert (mass.answer_share > 0).all()
    assert (mass.noise_share > 0.5).all()


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


def test_the_measures_run_on_the_data_of_a_run() -> None:
    """Of a run on needle documents; and of plain text, by the blocks of its validation."""
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, pad_token_id=256, eos_token_id=256)).eval()
    batches = NeedleBatches(None, TASK, TASK, documents=1, vocab_size=257)
    sizes = {"needles": 2, "queried": 1, "digits": 3, "length": 420, "samples": 1}
    for name, count in (("needles", 2 + len(DEPTHS)), ("needle_attention", 1 + 4 * len(DEPTHS))):
        measured = EvalInput(model=model, variant="it", batches=batches, tokenizer=TOKENIZER)
        assert len(MeasurementRequest(name=name, options=sizes).run(measured)) == count


def test_a_haystack_is_the_blocks_text() -> None:
    tokens = TOKENIZER.encode("abcdefgh")

    class Blocks:
        def validation_batches(self) -> Any:
            yield {"input_ids": torch.tensor([tokens[:4], tokens[3:7]])}
            yield {"input_ids": torch.tensor([[tokens[6], 256, tokens[7], 256]])}

    assert haystack(Blocks(), TOKENIZER) == "abcdefgh"  # type: ignore[arg-type]  # a stand-in
