"""What `bench model` does on CUDA, told from a machine without it."""

import dataclasses
from typing import Any

import pytest
import torch

from diff_lab.bench import benchmark, model_bench
from diff_lab.bench.bench_pages import page, page_part
from diff_lab.bench.benchmark import DECODE, FORWARD, NO_MEMORY, STEP
from diff_lab.bench.model_bench import ModelSettings, measure_model
from diff_lab.results_files import write_json
from diff_transformer.utils.files import read_json


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "check_device", lambda device: None)


@pytest.fixture
def small() -> ModelSettings:
    return ModelSettings(
        dtypes=("bfloat16",), lengths=(16, 24), hidden_size=32, intermediate_size=48, layers=2,
        head_dim=8, vocabulary=50, rounds=5, candidates=("diff",),
    )  # fmt: skip


def test_the_layers_are_those_of_table_7(believed: None) -> None:
    assert ModelSettings.on("cpu") == ModelSettings()
    on_cuda = ModelSettings.on("cuda")
    config = on_cuda.config()
    assert (config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (3072, 8192, 100_288)
    assert (config["num_attention_heads"], config["head_dim"]) == (24, 128)
    assert on_cuda.cases() == [(name, length) for name in (FORWARD, STEP, DECODE) for length in (2048, 4096)]
    assert [on_cuda.batch_of(*case) for case in on_cuda.cases()] == [2, 1, 2, 1, 1, 1]
    assert (on_cuda.for_check.layers, on_cuda.for_check.vocabulary, on_cuda.layers) == (1, 8192, 12)
    assert ModelSettings.on("cuda", batch=3).batch_of(STEP, 2048) == 3


def test_results_are_checked_on_fewer_layers(small: ModelSettings, notes: Any, tmp_path: Any) -> None:
    document = measure_model(dataclasses.replace(small, check_layers=1, check_vocabulary=30), notes)
    rows = notes.rows
    assert document["notes"] == ["Results were checked with 1 of the layers and a vocabulary of 30."]
    assert {(row.pass_, row.shape["length"]) for row in rows} == {
        (FORWARD, 16), (FORWARD, 24), (STEP, 16), (STEP, 24), (DECODE, 16), (DECODE, 24)
    }  # fmt: skip
    for row in rows:
        assert row.shape["layers"] == 2
        assert row.milliseconds is not None
        tokens = row.shape["batch"] * (1 if row.pass_ == DECODE else row.shape["length"])
        assert row.tokens_per_second == pytest.approx(tokens / row.milliseconds * 1e3)
    assert " tokens/s" in str(rows[0])
    written = read_json(write_json(tmp_path / "model.json", document))
    assert page_part("tokens", written).splitlines()[0] == "| pass | dtype | length | softmax | diff |"
    assert document["notes"][0] in page(written)


@pytest.mark.parametrize(("lost", "timed"), [("diff", {"softmax"}), ("softmax", set())])
def test_a_model_that_does_not_fit_has_a_reason(
    small: ModelSettings, notes: Any, monkeypatch: pytest.MonkeyPatch, lost: str, timed: set[str]
) -> None:
    timed_pass = model_bench.timed_pass

    def too_large(built: Any, *arguments: Any) -> Any:
        if built.config.attention_type == lost:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return timed_pass(built, *arguments)

    monkeypatch.setattr(model_bench, "timed_pass", too_large)
    measure_model(dataclasses.replace(small, passes=("forward",), lengths=(16,)), notes)
    rows = notes.rows
    assert {row.candidate for row in rows if row.ratio is not None} == timed
    assert {row.candidate: row.reason for row in rows}[lost] == NO_MEMORY
