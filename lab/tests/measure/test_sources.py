"""Documents and questions: from a file, line by line, and from held-out text."""

import json
from pathlib import Path

import pytest

from corpora import written
from diff_lab.data import TextBatches, TextFiles, byte_tokenizer, prepare
from diff_lab.measure.question_files import (
    Line,
    Question,
    Source,
    cloze_questions,
    held_out_sources,
    read_lines,
    read_sources,
)
from harness_tasks import write_lines

LINES = [
    {"document": "One. Two.", "question": "How many?", "reference": "two", "id": 1},
    {"document": "Three.\u2028Four.", "question": None},
    {"document": "Five"},
]


@pytest.mark.parametrize(("end", "encoding"), [("\r\n\r\n", "utf-8"), ("\n", "utf-8-sig")])
def test_a_file_is_read_as_it_stands(tmp_path: Path, end: str, encoding: str) -> None:
    """A separator that splitlines() would take for the end of a line is none."""
    path = tmp_path / "d.jsonl"
    path.write_text(end.join(json.dumps(line, ensure_ascii=False) for line in LINES), encoding=encoding)
    assert read_sources(path, 9, 99) == [
        Source(document="One. Two.", question="How many?", reference="two"),
        Source(document="Three.\u2028Four."),
        Source(document="Five"),
    ]


def test_some_are_drawn_and_all_read_the_same(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"document": f"{number:02}"} for number in range(50)])
    drawn = [source.document for source in read_sources(path, 10, 99)]
    assert len(set(drawn)) == 10
    assert drawn == sorted(drawn) != [f"{number:02}" for number in range(10)]
    assert drawn == [source.document for source in read_sources(path, 10, 99)]
    assert len(read_sources(path, 100, 99)) == 50


@pytest.mark.parametrize(
    ("characters", "expected"), [(100, "It rains. It snows! Does it?"), (25, "It rains. It snows!"), (15, "It rains.")]
)
def test_a_long_document_ends_with_a_sentence(tmp_path: Path, characters: int, expected: str) -> None:
    path = write_lines(tmp_path / "d.jsonl", [{"document": "It rains. It snows! Does it?"}])
    assert read_sources(path, 1, characters)[0].document == expected
    write_lines(tmp_path / "d.jsonl", [{"document": "A. " + "x" * 50}])  # one sentence, which is cut
    assert read_sources(path, 1, 20)[0].document == "A. " + "x" * 17


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (Source, '{"document": "x"', "is not JSON"),
        (Source, "[" * 100_000, "is not JSON"),
        (Source, '["x"]', "cannot be taken: it should be a valid dictionary"),
        (Source, '{"question": "x"}', "cannot take nothing for document"),
        (Source, '{"document": " "}', "cannot take ' ' for document (a text that is not empty)"),
        (Question, '{"question": "x", "answer": 0}', "cannot take nothing for choices"),
        (Question, '{"choices": ["a", "b"], "answer": 0}', "lacks a field 'question' or 'context'"),
        (Question, '{"question": "x", "choices": ["a", "a"], "answer": 0}', "'choices' must differ"),
        (Question, '{"question": "x", "choices": ["a", "b"], "answer": 2}', "number of a choice, 0 to 1, got 2"),
        (Question, json.dumps({"question": "x", "choices": [["word"] * 100_000]}), "…"),
    ],
    ids=range(10),
)
def test_a_bad_line_is_named(tmp_path: Path, kind: type[Line], line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    right = {"document": "x", "context": "x", "choices": ["a", "b"], "answer": 0}
    path.write_text(f"{json.dumps(right)}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3") as caught:
        read_lines(path, kind, "lines")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_is_no_file_of_lines(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file of documents at '.*nowhere\.jsonl'"):
        read_sources(tmp_path / "nowhere.jsonl", 1, 99)
    (tmp_path / "empty.jsonl").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no documents"):
        read_sources(tmp_path / "empty.jsonl", 1, 99)


def test_documents_from_held_out_text(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"Text {number} begins. " + "It goes on and on. " * (number % 7))
    tokenizer = byte_tokenizer()
    cache = prepare(TextFiles([tmp_path]), tokenizer, tmp_path / "cache")
    batches = TextBatches(cache, tokenizer, length=128, batch_size=4, validation_fraction=0.5)
    sources = held_out_sources(batches, tokenizer, limit=5, characters=60)
    assert len(sources) == 5
    held_out = "".join(str(tokenizer.decode(batch["input_ids"].flatten())) for batch in batches.validation_batches())
    for source in sources:
        assert source.question is None
        assert 30 <= len(source.document) <= 60
        assert source.document in held_out
        assert "endoftext" not in source.document
    with pytest.raises(ValueError, match="500 characters of one document"):
        held_out_sources(batches, tokenizer, limit=5, characters=1000)


def batches_of(folder: Path, count: int) -> TextBatches:
    folder.mkdir()
    text = [" ".join(f"{number * step} sheep of {number} jump." for step in range(1, 9)) for number in range(count)]
    corpus = written(text, folder)
    tokenizer = byte_tokenizer()
    cache = prepare(corpus, tokenizer, folder / "cache")
    return TextBatches(cache, tokenizer, length=64, batch_size=4, validation_fraction=0.5)


def test_the_right_choice_goes_on_from_the_beginning(tmp_path: Path) -> None:
    batches, tokenizer = batches_of(tmp_path / "text", 60), byte_tokenizer()
    questions = cloze_questions(batches, tokenizer, count=20, characters=45)
    assert len(questions) == 20
    text = " ".join(
        " ".join(tokenizer.decode(row).replace("<|endoftext|>", "").split())
        for batch in batches.validation_batches()
        for row in batch["input_ids"]
    )
    places = set()
    for question in questions:
        right = question.choices[question.answer]
        assert f"{question.prompt} {right}" in text
        assert len(f"{question.prompt} {right}") <= 45
        assert len(question.choices) == len(set(question.choices)) == 4
        places.add(question.answer)
    assert places == {0, 1, 2, 3}
    assert cloze_questions(batches, tokenizer, count=20, characters=45) == questions


def test_too_little_text(tmp_path: Path) -> None:
    batches = batches_of(tmp_path / "text", 60)
    with pytest.raises(ValueError, match="has 0 pieces of 500 characters, and the choices of a question are 4"):
        cloze_questions(batches, byte_tokenizer(), count=20, characters=500)
