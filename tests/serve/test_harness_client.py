"""lm-evaluation-harness scores a served model (its model type local-completions) as it scores one in memory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

from diff_lab.data import byte_tokenizer
from diff_lab.measure.harness import load_tasks, wrap_model
from harness_tasks import write_lines, write_task
from running_server import CONTEXT, new_model, new_served, running

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


@pytest.mark.parametrize("tokenized", [True, False])
def test_texts_are_those_of_generate(make_client: Any, alone: Any, tokenized: bool) -> None:
    whole = alone("to be", 24)
    stop = whole[10:13]
    arguments = ("to be", {"until": [stop, "\0never"], "max_gen_toks": 24, "temperature": 0})
    (text,) = make_client(tokenized_requests=tokenized).generate_until([Instance("generate_until", {}, arguments, 0)])
    assert text == whole[: whole.index(stop)]


@pytest.mark.all
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_command_of_the_page_scores_and_writes_with_a_small_context(tmp_path: Path) -> None:
    """Where the harness would send 2,047 tokens, and ask for 256."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (block,) = (
        found for found in re.findall("^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "lm_eval" in found
    )
    (fewer,) = re.findall(r"`(--gen_kwargs \S+)`", page)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    long = {"doc_to_text": "{{text * 40}}"}
    write_task(tmp_path / "tasks", "scored", [" not to be", " xyz"], **long)
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    written = {"doc_to_choice": None, "doc_to_target": "x", "metric_list": [exact], **long}
    write_task(tmp_path / "tasks", "written", ["x"], output_type="generate_until", **written)
    served = new_served()
    served.name = "mine"
    with running(served) as url:
        for name, ours in {
            "http://127.0.0.1:8000/v1": url,
            "runs/mine/model": str(tmp_path / "tokenizer"),
            "--tasks piqa": f"--tasks scored,written {fewer} --include_path {tmp_path / 'tasks'}",
        }.items():
            assert name in block
            block = block.replace(name, ours)
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_DATASETS_CACHE": str(tmp_path),
        }
        done = subprocess.run(
            ["bash", "-ec", block], capture_output=True, text=True, env={**os.environ, **environment}, check=False
        )
    assert done.returncode == 0, done.stderr[-30000:]
    assert re.findall(r"^\|(\w+) *\|.*\|(acc|exact_match) *\|", done.stdout, re.MULTILINE) == [
        ("scored", "acc"),
        ("written", "exact_match"),
    ]
