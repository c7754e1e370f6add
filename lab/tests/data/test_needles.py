"""Needle documents hold what they promise, where they say it."""

from collections import Counter
from typing import Any

import pytest
import torch

from diff_lab.data import NeedleBatches, NeedleDocument, NeedleTask, TextBatches, byte_tokenizer, train_bpe
from diff_lab.data.needle_task import needle, question

PROSE = " ".join(f'This is sentence number {n}; it says nothing of note. "Is it?" Not so!' for n in range(400))
CODE = "\n".join(f"value_{n} = function({n}, 'é')" for n in range(800))


@pytest.fixture(scope="module")
def bpe() -> object:
    return train_bpe([PROSE, CODE], 500)


def decoded(tokenizer: object, document: NeedleDocument, begin: int, end: int | None) -> str:
    return str(tokenizer.decode(list(document.tokens[begin:end])))  # type: ignore[attr-defined]  # any tokenizer


@pytest.mark.parametrize("haystack", [PROSE, CODE], ids=["prose", "code"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_places(kind: str, haystack: str, request: pytest.FixtureRequest) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else request.getfixturevalue("bpe")
    task = NeedleTask(tokenizer, haystack, length=700, needles=4, queried=2, digits=5)
    for depth in (0.0, 0.3, 1.0, None):
        for document in task.sample(5, seed=1, depth=depth):
            assert 500 < len(document.tokens) <= 700
            full_text = decoded(tokenizer, document, 0, None)
            context = decoded(tokenizer, document, 0, document.context_length)
            lines = [line for line in context.split("\n") if line.startswith("The special magic")]
            assert len(lines) == 4  # on lines of their own, and nothing else on these
            named = [line.split()[3] for line in lines]
            for number, (begin, end), (first, last), position in zip(
                document.numbers,
                document.answer_spans,
                document.needle_spans,
                document.query_positions,
                strict=True,
            ):
                assert len(number) == 5
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
            assert sum(document.learned) == len(document.tokens) - document.prompt_length
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


def test_documents_are_functions_of_their_stream() -> None:
    task = NeedleTask(byte_tokenizer(), PROSE, length=600, needles=3, queried=1)
    assert task.draw((3, 0, 1)) == task.draw((3, 0, 1))
    assert task.draw((3, 0, 1)) != task.draw((4, 0, 1))
    assert task.draw((3, 1, 1)) != task.draw((3, 0, 1))


def test_turns_and_varied_numbers() -> None:
    task = NeedleTask(byte_tokenizer(), PROSE, length=1500, needles=4, queried=2, digits=3, turns=3, vary=True)
    counts: Counter[tuple[int, int]] = Counter()
    for document in task.sample(60, seed=0):
        text = decoded(byte_tokenizer(), document, 0, None)
        context = decoded(byte_tokenizer(), document, 0, document.context_length)
        counts[context.count("The special magic"), len(document.numbers)] += 1
        assert text.count("What") == 3
        learned = "".join(
            chr(token)
            for token, is_learned in zip(document.tokens, document.learned, strict=True)
            if is_learned and token < 256
        )
        assert learned.count("The special magic") == text.count("The special magic") - context.count("The special")
    assert set(counts) == {(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)}


def test_batches_of_text_and_documents() -> None:
    """Text above, needle documents below; these are learned in their answers alone."""

    class Text:
        batch_size = 2

        def train_batch(self, step: int) -> dict[str, torch.Tensor]:
            ids = torch.full((2, 600), step)
            return {"input_ids": ids, "labels": ids, "position_ids": torch.zeros_like(ids)}

    task = NeedleTask(byte_tokenizer(), PROSE, length=600, needles=2, queried=1, digits=3)
    text: TextBatches = Text()  # type: ignore[assignment]  # a stand-in
    mixed = NeedleBatches(text, task, task, documents=3, vocab_size=257, seed=5, validation_documents=7)
    batch = mixed.train_batch(4)
    assert {name: tuple(part.shape) for name, part in batch.items()} == dict.fromkeys(batch, (5, 600))
    assert (batch["input_ids"][:2] == 4).all()
    assert batch["position_ids"][2].tolist() == list(range(600))
    alone = NeedleBatches(None, task, task, documents=3, vocab_size=257, seed=5).train_batch(4)
    assert alone.keys() == {"input_ids", "labels"}
    for name, part in alone.items():
        assert part.equal(batch[name][2:])
    labels = alone["labels"][0]
    answer = "".join(map(chr, labels[(labels != -100) & (labels < 256)].tolist()))
    assert answer.startswith("The special magic ")
    assert answer[-3:].isdigit()
    assert not alone["input_ids"].equal(mixed.train_batch(5)["input_ids"][2:])
    sizes = [len(part["input_ids"]) for part in mixed.validation_batches()]
    assert sizes == [5, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"queried": 3}, "needles=2, queried=3"),
        ({"needles": 0, "queried": 0}, "needles=0"),
        ({"digits": 0}, "digits=0"),
        ({"length": 200}, "length=200 has no room"),
        ({"length": 10**6}, "fewer tokens than one document"),
    ],
)
def test_what_is_refused(changed: dict[str, int], message: str) -> None:
    settings: dict[str, Any] = {"length": 600, "needles": 2, "queried": 1} | changed
    with pytest.raises(ValueError, match=message):
        NeedleTask(byte_tokenizer(), PROSE, **settings)


def test_a_depth_outside_is_refused() -> None:
    task = NeedleTask(byte_tokenizer(), PROSE, length=600, needles=2, queried=1)
    with pytest.raises(ValueError, match=r"got 1\.5"):
        task.sample(1, 0, depth=1.5)
