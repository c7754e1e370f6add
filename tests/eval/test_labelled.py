"""Labelled questions through the whole protocol, on tiny models of ours and of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diff_transformer.data import LabelledText, byte_tokenizer
from diff_transformer.eval.labelled import MANY_SHOT, labelled_answers
from diff_transformer.eval.labels import label_log_likelihoods, label_trie
from diff_transformer.eval.measures import Subject
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

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


@pytest.fixture(params=["diff", "llama"])
def reader(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 257, "max_position_embeddings": 512, "initializer_range": 0.3, **SIZES}
    if request.param == "diff":
        return DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def test_labelled_answers_equal_those_of_whole_prompts(reader: Any) -> None:
    """The prompt of shared demonstrations, read once, against the whole text of each question."""
    tokenizer = byte_tokenizer()
    trie = label_trie(lambda text: tokenizer.encode(text), QUESTIONS.labels)
    right = labelled_answers(reader, tokenizer, QUESTIONS, shots=4, queries=6, seed=2, exact=True)
    greedy = labelled_answers(reader, tokenizer, QUESTIONS, shots=4, queries=6, seed=2)
    assert len(right) == len(greedy) == 6

    random = np.random.default_rng(2)
    shown = "".join(QUESTIONS.demonstration(*QUESTIONS.train[n]) for n in random.permutation(9)[:4])
    assert shown.count("\n==\n") == 4
    for number, answer in zip(random.permutation(6)[:6], right, strict=True):
        text, label = QUESTIONS.test[number]
        prompt = torch.tensor(tokenizer.encode(shown + QUESTIONS.query(text)))
        likelihoods = label_log_likelihoods(reader, trie, prompt)[1]
        assert answer == (QUESTIONS.labels[int(likelihoods.argmax())] == label)


def test_the_measure_reads_a_folder(reader: Any, tmp_path: Path) -> None:
    rows = "".join(f"HUM:ind who was {n} ?\nNUM:date when was {n} ?\n" for n in range(6))
    (tmp_path / "train.txt").write_text(rows)
    (tmp_path / "test.txt").write_text(rows)
    options = {**MANY_SHOT.options, "folder": str(tmp_path), "shots": [2, 4], "queries": 5}
    records = MANY_SHOT.measure(Subject(model=reader, arm="it", tokenizer=byte_tokenizer(), options=options))
    assert [(record.name, record.group, record.n) for record in records] == [
        ("many_shot/trec", "2 shots", 5),
        ("many_shot/trec", "4 shots", 5),
    ]


def test_what_is_refused(reader: Any) -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="shots is between 1 and the 9 texts of trec, got 10"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=10, queries=1)
    with pytest.raises(ValueError, match="queries is between 1 and the 6 texts of trec, got 0"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=1, queries=0)
    reader.config.max_position_embeddings = 100
    with pytest.raises(ValueError, match=r"9 shots of trec take .* tokens and the model has 100 positions"):
        labelled_answers(reader, tokenizer, QUESTIONS, shots=9, queries=1)
    with pytest.raises(ValueError, match="--option folder"):
        MANY_SHOT.measure(Subject(model=reader, arm="it", tokenizer=tokenizer, options=MANY_SHOT.options))
