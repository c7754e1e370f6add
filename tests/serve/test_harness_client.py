"""lm-evaluation-harness scores a served model (its model type local-completions) as it scores one in memory."""

from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

from diff_lab.data import byte_tokenizer
from diff_lab.measure.harness import load_tasks, wrap_model
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
    seen = []
    for model in (wrap_model(new_model(), byte_tokenizer(), 2), make_client(**settings)):
        answer = evaluate(model, load_tasks([file])[file], bootstrap_iters=0, log_samples=True)
        responses = [each[0] for sample in answer["samples"]["mine"] for each in sample["filtered_resps"]]
        greedy = [each[1] for sample in answer["samples"]["mine"] for each in sample["filtered_resps"]]
        seen.append((responses, greedy, answer["results"]["mine"]["acc,none"]))
    assert len(seen[0][0]) == 8
    assert seen[1][0] == pytest.approx(seen[0][0], rel=1e-10)
    assert seen[1][1:] == seen[0][1:]
