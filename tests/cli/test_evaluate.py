"""`diff-transformer eval` reads text with the tokenizer that the model was trained with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from diff_transformer.cli.evaluate import _batches


def test_a_run_is_measured_with_its_own_tokenizer(run: Callable[..., Any], tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("the cat sat on the mat and the dog lay by the door. " * 200, encoding="utf-8")
    folder = tmp_path / "run"
    settings = [
        "data.tokenizer=bpe",
        "data.vocab_size=270",
        f"data.paths=['{text}']",
        "train.steps=1",
        "data.length=16",
    ]
    assert run("train", "tiny", *settings, "--output", folder).exit_code == 0
    trained = AutoTokenizer.from_pretrained(folder / "model")
    text.write_text("QUITE ANOTHER TEXT, IN WHICH OTHER PAIRS OF LETTERS ARE FREQUENT. " * 200, encoding="utf-8")
    batch = next(iter(_batches(folder / "model", None, 16).validation_batches()))
    read = trained.decode(batch["input_ids"][0])
    assert read in text.read_text(encoding="utf-8")
