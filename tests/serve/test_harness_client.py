"""lm-evaluation-harness scores a served model (its model type local-completions) as it scores one in memory."""

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

from diff_transformer.data import byte_tokenizer
from diff_transformer.lab.measure.harness import load_tasks, wrap_model
from harness_tasks import write_lines
from running_server import CONTEXT, new_model

QUESTIONS = [
    {"question": "What is 1 + 1?", "choices": ["one", "two", "a"], "answer": 1},
    {"context": "to be, or", "choices": ["not to be", "xyz", "no"], "answer": 0},
    {"context": "It rains.", "question": "Is it dry?", "choices": ["no", "λ yes"], "answer": 0},
]


@pytest.fixture
def make_client(url: str, tmp_path: Path) -> Any:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def make(**settings: Any) -> Any:
        return LocalCompletionsAPI(
            base_url=f"{url}/completions",
            model="tiny",
            tokenizer=str(tmp_path / "tokenizer"),
            max_length=CONTEXT,
            **settings,
        )

    return make


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"num_concurrent": 4}], ids=str)
def test_scores_are_those_in_memory(make_client: Any, tmp_path: Path, settings: dict[str, int]) -> None:
    file = str(write_lines(tmp_path / "mine.jsonl", QUESTIONS))
    answers = [
        evaluate(model, load_tasks([file])[file], bootstrap_iters=0, log_samples=True)
        for model in (wrap_model(new_model(), byte_tokenizer(), 2), make_client(**settings))
    ]
    scores = [
        [response[0] for sample in answer["samples"]["mine"] for response in sample["filtered_resps"]]
        for answer in answers
    ]
    greedy = [
        [response[1] for sample in answer["samples"]["mine"] for response in sample["filtered_resps"]]
        for answer in answers
    ]
    assert len(scores[0]) == 8
    assert scores[1] == pytest.approx(scores[0], rel=1e-10)
    assert greedy[1] == greedy[0]
    assert answers[1]["results"]["mine"]["acc,none"] == answers[0]["results"]["mine"]["acc,none"]


@pytest.mark.parametrize("tokenized", [True, False])
def test_texts_are_those_of_generate(make_client: Any, alone: Any, tokenized: bool) -> None:
    whole = alone("to be", 24)
    stop = whole[10:13]
    arguments = ("to be", {"until": [stop, "\0never"], "max_gen_toks": 24, "temperature": 0})
    (text,) = make_client(tokenized_requests=tokenized).generate_until([Instance("generate_until", {}, arguments, 0)])
    assert text == whole[: whole.index(stop)]
