"""lm-evaluation-harness on our models and on others: its scores are the models' own, and its answers become records."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from torch import Tensor

from any_model import THEIRS, any_model
from diff_lab.data import byte_tokenizer, train_bpe
from diff_lab.measure.harness import (
    AVERAGE,
    FEWSHOT_SEED,
    TABLE_1,
    TABLE_1_MEASURES,
    _records,
    load_tasks,
    measure_tasks,
    published,
    table_1_average,
    task_names,
    wrap_model,
)
from diff_lab.record import Result
from diff_lab.statistics import proportion_interval
from harness_tasks import write_lines, write_task
from tiny_model import KINDS, SIZES

MODEL: dict[str, Any] = {**SIZES, "vocab_size": 270, "max_position_embeddings": 48, "initializer_range": 0.4}
QUESTIONS = [
    {"question": "What is 1 + 1?", "choices": ["one", "two", "a"], "answer": 1},
    {"context": "to be, or", "choices": ["not to be", "xyz", "no"], "answer": 0, "id": 7},
    {"context": "", "choices": ["the cat sat", "cat the sat"], "answer": 0},
    {"context": "It rains.", "question": "Is it dry?", "choices": ["no", "λ yes"], "answer": 0},
    {"context": "a long story of which the beginning does not fit, " * 2, "choices": ["end", "ends"], "answer": 1},
]
PROMPTS = [
    "Question: What is 1 + 1?\nAnswer:",
    "to be, or",
    "",
    "It rains.\nQuestion: Is it dry?\nAnswer:",
    "a long story of which the beginning does not fit, a long story of which the beginning does not fit,",
]
MODELS = (*KINDS, *THEIRS)


def bpe() -> Any:
    return train_bpe(["to be, or not to be; the cat sat on the mat. Question: Answer: " * 20], 266)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_lines(tmp_path_factory.mktemp("tasks") / "mine.jsonl", QUESTIONS))


@pytest.fixture
def small() -> Any:
    return any_model("diff", 3, **MODEL).double()


def only(results: Iterator[tuple[list[Result], str]]) -> tuple[list[Result], str]:
    (result,) = results
    return result


@torch.no_grad()
def by_hand(model: Any, tokenizer: Any, prompt: str, choice: str) -> float:
    """log P(choice | prompt) from plain logits, one text at a time, without padding."""
    before: list[int] = tokenizer(prompt)["input_ids"]
    tokens: list[int] = tokenizer(f"{prompt} {choice}")["input_ids"]
    count = len(tokens) - len(before)
    if not before:
        tokens = [tokenizer.eos_token_id, *tokens]
    tokens = tokens[-(MODEL["max_position_embeddings"] + 1) :]
    logits: Tensor = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]
    return float(chosen[-count:].sum())


@pytest.mark.parametrize("tokenizer", [byte_tokenizer, bpe], ids=["bytes", "bpe"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_models_own(name: str, tokenizer: Callable[[], Any], file: str) -> None:
    model, tokens = any_model(name, 3, **MODEL).double(), tokenizer()
    expected = [
        [by_hand(model, tokens, prompt, choice) for choice in line["choices"]]  # type: ignore[attr-defined]
        for prompt, line in zip(PROMPTS, QUESTIONS, strict=True)
    ]
    tasks = load_tasks([file])
    for batch_size in (1, 3):
        answer = evaluate(wrap_model(model, tokens, batch_size), tasks[file], bootstrap_iters=0, log_samples=True)
        for sample, scores in zip(answer["samples"]["mine"], expected, strict=True):
            found = [response[0] for response in sample["filtered_resps"]]
            assert found == pytest.approx(scores, rel=1e-10)
    (acc, _), note = only(measure_tasks(model, tokens, tasks, name, batch_size=2))
    right = [scores.index(max(scores)) == line["answer"] for scores, line in zip(expected, QUESTIONS, strict=True)]
    assert acc.value == sum(right) / 5
    assert note == f"{file}: 2 texts were longer than the model's context and lost their beginning."


def test_records_say_what_was_measured(small: Any, file: str) -> None:
    records, _ = only(measure_tasks(small, byte_tokenizer(), load_tasks([file]), "diff"))
    assert [record.name for record in records] == ["harness/mine/acc", "harness/mine/acc_norm"]
    for record in records:
        assert (record.variant, record.n, record.better, record.seed) == ("diff", 5, "higher", None)
        assert record.interval == proportion_interval(round(record.value * 5), 5)
        assert record.method == "0-shot; Wilson's score interval"
    assert only(measure_tasks(small, byte_tokenizer(), load_tasks([file]), "diff", limit=2))[0][0].n == 2


def test_names_that_are_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mine' is named twice"):
        load_tasks([file, str(Path(file).parent / ".." / Path(file).parent.name / "mine.jsonl")])
    with pytest.raises(ValueError, match=r"'piqa\.jsonl' has the name of the paper's task 'piqa'"):
        load_tasks(["piqa.jsonl"])
    with pytest.raises(FileNotFoundError, match="The folder of tasks"):
        load_tasks(["mine"], [tmp_path / "none"])


def test_own_yaml_tasks_are_found(small: Any, file: str, tmp_path: Path) -> None:
    write_task(tmp_path / "tasks", "piqa", ["not", "xyz"], num_fewshot=0)
    tasks = load_tasks(["piqa", file], [tmp_path / "tasks"])
    (piqa, _), (mine, _) = measure_tasks(small, byte_tokenizer(), tasks, "diff", num_fewshot=1)
    scores = [by_hand(small, byte_tokenizer(), "to be or", choice) for choice in ("not", "xyz")]
    assert [record.name for record in piqa] == ["harness/piqa/acc", "harness/piqa/acc_norm"]
    right = 4 * (scores[0] > scores[1])  # of four times the same question
    for record in piqa:
        assert (record.value, record.n, record.interval) == (right / 4, 4, proportion_interval(right, 4))
    assert mine[0].n == 5
    # The first says in its definition that it cannot do with examples.
    assert [records[0].method.partition(";")[0] for records in (piqa, mine)] == ["0-shot", "1-shot"]
    assert (piqa[0].seed, mine[0].seed) == (None, FEWSHOT_SEED)


def test_definitions_that_do_not_work(small: Any, tmp_path: Path) -> None:
    write_task(tmp_path, "broken", ["not", "xyz"], metric_list=[{"metrik": "acc"}])
    with pytest.raises(ValueError, match="lm_eval cannot load the task 'broken': 'metric' key not provided"):
        load_tasks(["broken"], [tmp_path])
    write_task(tmp_path, "elsewhere", ["not", "xyz"], dataset_kwargs={"data_files": {"test": str(tmp_path / "none")}})
    with pytest.raises(ValueError, match="lm_eval cannot load the task 'elsewhere': Unable to find"):
        load_tasks(["elsewhere"], [tmp_path])
    write_task(tmp_path, "unsafe", ["not", "xyz"], unsafe_code=True)
    with pytest.raises(ValueError, match=r"lm_eval cannot run the task 'unsafe' .* marked as unsafe"):
        only(measure_tasks(small, byte_tokenizer(), load_tasks(["unsafe"], [tmp_path]), "diff"))


def test_what_does_not_fit_the_model_is_refused(small: Any, file: str, tmp_path: Path) -> None:
    tokens = byte_tokenizer()
    with pytest.raises(ValueError, match=r"lm_eval cannot run the task '.*mine\.jsonl' with this model: Sample larger"):
        only(measure_tasks(small, tokens, load_tasks([file]), "diff", num_fewshot=5))
    path = str(write_lines(tmp_path / "long.jsonl", [{"context": "a", "choices": ["b", "c" * 48], "answer": 0}]))
    with pytest.raises(ValueError, match=r"An answer has 49 tokens, and the model's context holds 48\."):
        only(measure_tasks(small, tokens, load_tasks([path]), "diff"))
    # 47 tokens of context and two of each answer, the last of which is never read.
    fits = [{"context": "a" * 46 + end, "choices": ["b", "c"], "answer": 0} for end in ("a", "aa")]
    path = str(write_lines(tmp_path / "fits.jsonl", fits))
    assert only(measure_tasks(small, tokens, load_tasks([path]), "diff"))[1].startswith(f"{path}: 2 texts")
    tokens.add_tokens([f"<{number}>" for number in range(20)])
    with pytest.raises(ValueError, match="The tokenizer has 277 tokens, the model only 270"):
        only(measure_tasks(small, tokens, load_tasks([file]), "diff"))
    tokens = byte_tokenizer()
    tokens.eos_token = None
    with pytest.raises(ValueError, match="neither a bos nor an eos token"):
        only(measure_tasks(small, tokens, load_tasks([file]), "diff"))


@pytest.mark.parametrize(
    ("metric", "value", "method"),
    [
        ("acc", 0.75, "Wilson's score interval"),
        ("exact_match", 2 / 3, "value ± 1.96 of lm_eval's standard error"),  # a mean of parts that weigh alike
        ("acc", 75.0, "value ± 1.96 of lm_eval's standard error"),
        ("f1", 0.75, "value ± 1.96 of lm_eval's standard error"),
    ],
)
def test_wilson_s_interval_is_of_answers_that_are_right_or_wrong(metric: str, value: float, method: str) -> None:
    results = {"it": {f"{metric},none": value, f"{metric}_stderr,none": 0.1}}
    outcome: dict[str, Any] = {"results": results, "n-samples": {"it": {"effective": 4}}, "n-shot": {}}
    (record,) = _records({**outcome, "higher_is_better": {}}, "diff")
    assert record.method == f"0-shot; {method}"


def records_of(values: dict[str, float], n: int = 101) -> list[Result]:
    return [
        Result(name=f"harness/{task}/{measure}", variant="diff", value=values[task], n=n)
        for task, measure in TABLE_1_MEASURES.items()
        if task in values
    ]


def test_table_1_and_its_average() -> None:
    values = dict(zip(TABLE_1_MEASURES, TABLE_1["DIFF-3B"], strict=True))
    records = records_of(values)
    average = table_1_average(records)
    assert average is not None
    assert average.value == pytest.approx(0.606, abs=5e-4)
    errors = [value * (1 - value) / 100 for value in values.values()]
    half = 1.96 * math.sqrt(sum(errors)) / 7
    assert average.interval == pytest.approx((average.value - half, average.value + half), abs=1e-4)
    assert (average.n, average.name) == (707, AVERAGE)
    # The averages that the paper prints.
    columns = published([*records, average])
    assert {model: column[AVERAGE] for model, column in columns.items()} == {
        "DIFF-3B": 0.606,
        "OpenLLaMA-3B-v2": 0.575,
        "StableLM-base-alpha-3B-v2": 0.568,
    }
    assert columns["DIFF-3B"]["harness/hellaswag/acc_norm"] == 0.714
    some = records_of({"piqa": 0.5})
    assert table_1_average(some) is None
    assert published(some) == {
        "DIFF-3B": {"harness/piqa/acc": 0.768},
        "OpenLLaMA-3B-v2": {"harness/piqa/acc": 0.767},
        "StableLM-base-alpha-3B-v2": {"harness/piqa/acc": 0.76},
    }
    assert published([Result(name="harness/mine/acc", variant="diff", value=0.5)]) == {}


def test_table1_stands_for_the_papers_seven() -> None:
    seven = ["arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande"]
    assert task_names(["table1"]) == seven
    assert task_names(["mine.jsonl, table1", "mmlu"]) == ["mine.jsonl", *seven, "mmlu"]
    assert task_names([" , "]) == []
