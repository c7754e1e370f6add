"""Needles in text: their places, and answers of models that are known and of tiny ones through the whole protocol."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from any_model import any_model
from diff_lab.data import RetrievalBatches, TextBatches, byte_tokenizer, train_bpe
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.needles import (
    DEPTHS,
    NeedleDocument,
    Needles,
    NeedleTask,
    document_attention,
    haystack,
    needle,
    needle_answers,
    question,
)
from diff_lab.train import load_recipe
from diff_transformer.model import attention_maps
from writing_model import WritingModel

PROSE = " ".join(f'This is sentence number {n}; it says nothing of note. "Is it?" Not so!' for n in range(400))
CODE = "\n".join(f"value_{n} = function({n}, 'é')" for n in range(800))
TEXT = " ".join(f"Sentence {n} says little." for n in range(300))
TOKENIZER = byte_tokenizer()
TASK = NeedleTask(TOKENIZER, TEXT, length=520, needles=3, queried=2)
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
}


class Blocks(TextBatches):
    """The text as validation data."""

    def __init__(self) -> None:
        self.length = 520

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        yield {"input_ids": torch.tensor([TOKENIZER.encode(TEXT)])}


@pytest.fixture(scope="module")
def bpe() -> object:
    return train_bpe([PROSE, CODE], 500)


def decoded(tokenizer: object, document: NeedleDocument, begin: int, end: int | None) -> str:
    return str(tokenizer.decode(list(document.tokens[begin:end])))  # type: ignore[attr-defined]  # any tokenizer


@pytest.mark.parametrize("haystack", [PROSE, CODE], ids=["prose", "code"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_places(kind: str, haystack: str, request: pytest.FixtureRequest) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else request.getfixturevalue("bpe")
    task = NeedleTask(tokenizer, haystack, length=800, needles=4, queried=2)
    for depth in (0.0, 0.3, 1.0, None):
        for document in task.sample(5, seed=1, depth=depth):
            assert 500 < len(document.tokens) <= 800
            full_text = decoded(tokenizer, document, 0, None)
            context = decoded(tokenizer, document, 0, document.context_length)
            lines = [line for line in context.split("\n") if line.startswith("The special magic")]
            assert len(lines) == 4  # on lines of their own, and nothing else on these
            named = [line.split()[3] for line in lines]
            for number, (begin, end), (first, last), position in zip(
                document.numbers, document.answer_spans, document.needle_spans, document.query_positions, strict=True
            ):
                assert len(number) == 7
                assert decoded(tokenizer, document, begin, end).strip() == number
                assert decoded(tokenizer, document, first, last).strip() in lines
                assert first < begin < end <= last <= document.context_length
                # The next token begins the same number in the answer, and not in the prompt.
                assert position + 1 >= document.prompt_length
                following = decoded(tokenizer, document, position + 1, position + 2).strip()
                assert following
                assert number.startswith(following)
            queried_cities = [
                name for name, line in zip(named, lines, strict=True) if line.split()[-1] in document.numbers
            ]
            assert len(queried_cities) == 2
            prompt = decoded(tokenizer, document, document.context_length, document.prompt_length)
            assert any(prompt == f"\n{question(cities)}\n" for cities in (queried_cities, queried_cities[::-1]))
            answer = decoded(tokenizer, document, document.prompt_length, None)
            assert answer.count("The special magic") == 2
            assert full_text == context + prompt + answer
            if depth is not None:
                start = context.index(f"is: {document.numbers[0]}")
                haystack_size = len(context) - sum(len(line) + 1 for line in lines)
                before = len(context[:start]) - sum(len(line) + 1 for line in lines if context.index(line) < start)
                assert abs(before / haystack_size - depth) < 0.25


def test_prose_is_cut_at_ends_of_sentences() -> None:
    task = NeedleTask(byte_tokenizer(), PROSE, length=900, needles=4, queried=1)
    for document in task.sample(8, seed=0):
        context = decoded(byte_tokenizer(), document, 0, document.context_length)
        parts = context.split("\nThe special magic ")
        assert all(part.rstrip()[-1] in '.!?"0123456789' for part in parts[:-1])


def test_the_templates_own_words() -> None:
    assert needle("Oslo", "4821907") == "The special magic Oslo number is: 4821907"
    assert question(["Oslo"]) == "What is the special magic number for Oslo?"
    assert question(["Oslo", "Rome"]) == "What are the special magic numbers for Oslo, and Rome?"


def test_documents_are_functions_of_seed_and_number() -> None:
    task = NeedleTask(TOKENIZER, PROSE, length=600, needles=3, queried=1)
    assert task.sample(2, 3) == task.sample(2, 3)
    assert task.sample(1, 3) != task.sample(1, 4)
    assert task.sample(2, 3)[0] != task.sample(2, 3)[1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queried": 3}, "needles=2, queried=3"),
        ({"length": 200}, "length=200 has no room"),
        ({"length": 10**6}, "fewer tokens than one document"),
    ],
)
def test_what_is_refused(changed: dict[str, int], message: str) -> None:
    settings: dict[str, Any] = {"length": 600, "needles": 2, "queried": 1} | changed
    with pytest.raises(ValueError, match=message):
        NeedleTask(TOKENIZER, PROSE, **settings)


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
    measured = EvalInput(model=half, variant="half", batches=Blocks(), tokenizer=TOKENIZER)
    records = Needles(needles=3, samples=3).run(measured)
    values = {(record.name, record.coordinates.label): record.value for record in records}
    assert values["needles/accuracy", "3 needles, 2 queried"] == 0.5
    assert values["needles/joint_accuracy", "3 needles, 2 queried"] == 0.0
    assert len(records) == 2 + len(DEPTHS)
    assert values["needles/accuracy_by_depth", "3 needles, 2 queried, depth 25 %"] == 0.5
    assert records[0].n == 3 * len(DEPTHS) * 2


def test_listing_all_numbers_does_not_fit_into_an_answer() -> None:
    """Of many needles: an answer has room for the numbers that are asked for and a few tokens more."""
    task = NeedleTask(TOKENIZER, TEXT, length=1100, needles=9, queried=1)
    lists = reads(lambda hidden, cities: " ".join(sorted(hidden.values())), positions=1200)
    answers = needle_answers(lists, TOKENIZER, task.sample(12, seed=0))
    assert 0 < sum(row[0] for row in answers) < 12


def test_a_document_that_is_too_long() -> None:
    model = any_model("llama", **{**SIZES, "max_position_embeddings": 300})
    with pytest.raises(ValueError, match="tokens and the model 300 positions"):
        needle_answers(model, TOKENIZER, TASK.sample(2, seed=0))


@torch.no_grad()
def test_attention_to_the_numbers() -> None:
    """Of every query by itself, on the maps that the model gives: the question is no noise, nor the asked needle."""
    model, documents = any_model("diff", **SIZES, initializer_range=0.3), TASK.sample(2, seed=0)
    mass = document_attention(model, documents)
    for row, document in enumerate(documents):
        maps = torch.stack([layer.difference for layer in attention_maps(model, torch.tensor([document.tokens]))])
        parts = zip(document.query_positions, document.answer_spans, document.needle_spans, strict=True)
        for number, (query, answer, around) in enumerate(parts):
            assert TOKENIZER.decode(document.tokens[slice(*answer)]) in document.numbers
            weights, sizes_of = maps[:, 0, :, query], maps[:, 0, :, query].abs()
            noise = [place for place in range(document.context_length) if place not in range(*around)]
            expected = [
                weights[..., slice(*answer)].sum(-1),
                sizes_of[..., slice(*answer)].sum(-1) / sizes_of.sum(-1),
                weights[..., noise].sum(-1),
                sizes_of[..., noise].sum(-1) / sizes_of.sum(-1),
            ]
            torch.testing.assert_close(mass[row, number], torch.stack(expected).mean((1, 2)))


def test_data_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="whole documents of text, and the data holds none: name some with --text"):
        Needles().run(EvalInput(model=None, variant="it", batches=RetrievalBatches()))


def test_levels_without_retrieval() -> None:
    """Numbers hardly ever coincide and may be listed in any order, as many as are asked for."""
    each, joint, *by_depth = Needles(needles=4, queried=2).baselines(load_recipe("tiny"))
    assert (each.floor, joint.floor, by_depth[0].floor) == (2 / 4, 1 / 6, 2 / 4)
    assert joint.chance == each.chance**2 == pytest.approx(9e6**-2)


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_the_measures_run_on_a_text(kind: str) -> None:
    model = any_model(kind, **SIZES, pad_token_id=256, eos_token_id=256)
    options = {"needles": 2, "queried": 1, "length": 420, "samples": 1}
    measured = EvalInput(model=model, variant="it", batches=Blocks(), tokenizer=TOKENIZER, seed=4)
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
