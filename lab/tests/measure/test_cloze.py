"""Questions from held-out text: the right choice is what follows, and the harness can read them."""

from pathlib import Path

import pytest

from corpora import written
from diff_lab.data import TextBatches, byte_tokenizer, prepare
from diff_lab.measure.question_files import cloze_questions


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
