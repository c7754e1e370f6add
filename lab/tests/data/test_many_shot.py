"""Many-shot sequences hold what they promise, and labelled texts are read from tables of two columns."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from diff_lab.data import ManyShotBatches, read_labelled

ROWS = [("Who painted  the fence ?", "human"), ("How far is it to Tromsø, pray ?", "number")]


def write(folder: Path, train: Any = ROWS, test: Any = (("Who was she ?", "human"),)) -> Path:
    for part, rows in (("train", train), ("test", test)):
        table = pandas.DataFrame(rows, columns=["text", "label"])
        table.to_csv(folder / f"{part}.csv", index=False, encoding="utf-8-sig")  # a byte order mark is no text
    return folder


def test_without_noise_every_item_has_the_label_of_its_words() -> None:
    task = ManyShotBatches(40, classes=3, labels=5, words=10, item_length=2, noise=0.0, batch_size=4)
    batch = task.train_batch(1)
    rows = batch["input_ids"].reshape(4, 40, 3)
    assert batch["input_ids"].shape == (4, task.length)
    for row in rows.tolist():
        label_of: dict[int, int] = {}
        for *words, label in row:
            assert label < 5
            for word in words:
                assert 5 <= word < task.vocab_size
                assert label_of.setdefault(word, label) == label
        assert len(set(label_of.values())) == 3
        assert max(Counter(label_of.values()).values()) <= 4  # ten words dealt out to three classes
    assert len({tuple(sorted(set(row[:, 2].tolist()))) for row in rows}) > 1  # sequences have labels of their own
    learned = batch["labels"].reshape(4, 40, 3)
    assert (learned[..., :2] == -100).all()
    assert learned[..., 2].equal(rows[..., 2])


def test_noise_is_the_share_of_labels_drawn_from_all() -> None:
    task = ManyShotBatches(classes=4, labels=4, words=8, item_length=1, noise=0.4)
    episode = task.episode(0, 0, shots=4000, queries=10, noise=0.4)
    label_of_class = episode.candidates[episode.classes]
    assert (episode.labels != label_of_class).float().mean().item() == pytest.approx(0.4 * 3 / 4, abs=0.03)
    clean = task.episode(0, 0, shots=4000, queries=10, noise=0.0)
    assert clean.labels.equal(clean.candidates[clean.classes])


def test_an_episode_and_its_orders() -> None:
    task = ManyShotBatches(words=12, noise=0.0)
    episode = task.episode(3, 7, shots=60, queries=20, noise=0.0)
    assert episode.prompt().shape == (180,)
    order = torch.arange(59, -1, -1)
    assert episode.prompt(order).reshape(60, 3).equal(episode.prompt().reshape(60, 3).flip(0))
    # Queries are answered by what was shown: their words have one label each.
    label_of = dict(zip(episode.items.flatten().tolist(), episode.labels.repeat_interleave(2).tolist(), strict=True))
    for words, answer in zip(episode.queries.tolist(), episode.answers.tolist(), strict=True):
        assert {label_of.get(word, answer) for word in words} == {answer}
    assert set(episode.answers.tolist()) <= set(episode.candidates.tolist())
    other = task.episode(3, 8, shots=60, queries=20, noise=0.0)
    assert not other.items.equal(episode.items)


def test_varied_numbers_of_classes() -> None:
    task = ManyShotBatches(60, classes=3, labels=5, words=6, item_length=1, noise=0.0, vary=True, batch_size=90)
    counts: Counter[tuple[int, int]] = Counter()
    for row in task.train_batch(1)["input_ids"].reshape(90, 60, 2).tolist():
        label_of: dict[int, int] = {}
        for word, label in row:
            assert label_of.setdefault(word, label) == label
        counts[len(set(label_of.values())), len(label_of)] += 1
    assert set(counts) == {(1, 2), (2, 4), (3, 6)}
    assert min(counts.values()) > 15
    validation = next(iter(task.validation_batches()))["input_ids"].reshape(-1, 60, 2)
    assert all(len(set(labels)) == 3 for labels in validation[..., 1].tolist())


def test_a_table_is_a_task(tmp_path: Path) -> None:
    task = read_labelled("trec", write(tmp_path))
    assert task.labels == ("human", "number")
    assert task.train == (("Who painted the fence ?", "human"), ROWS[1])
    assert task.test == (("Who was she ?", "human"),)
    assert task.demonstration(*task.train[0]) == "Question: Who painted the fence ?\nType: human\n==\n"
    assert task.query("Why ?") == "Question: Why ?\nType:"
    assert read_labelled("my task", tmp_path).query("Why ?") == "text: Why ?\nlabel:"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": [("Who ?", "human"), ("", "human")]}, r"train\.csv, row 2: a text and its label are not empty"),
        ({"train": [("word " * 10_000, "")]}, r"got \['word .{52}…\.$"),
        ({"train": [("Where ?", "location")]}, "the test part of trec alone has the label 'human'"),
        ({"test": []}, r"test\.csv has no rows"),
    ],
)
def test_what_is_refused(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_labelled("trec", write(tmp_path, **rows))


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file '.*train\.csv' of labelled texts"):
        read_labelled("trec", tmp_path)
    for name, content, message in (
        ("train.csv", "", r"train\.csv cannot be read: "),
        ("train.csv", "text,category\na,b\n", "no columns 'text' and 'label', but 'text', 'category'"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_labelled("trec", tmp_path)
