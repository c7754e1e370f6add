"""What `bench model` does on CUDA, told from a machine without it."""

import dataclasses
from typing import Any

import pytest
import torch

from diff_lab.bench import benchmark, model_bench
from diff_lab.bench.bench_pages import page, page_part, row_line
from diff_lab.bench.benchmark import DECODE, FORWARD, STEP, BenchRow
from diff_lab.bench.model_bench import (
    PAPER_LAYERS,
    ModelSettings,
    in_dtype,
    layers_that_fit,
    measure_model,
)
from diff_lab.bench.timing import NO_MEMORY
from diff_lab.results_files import write_json
from diff_transformer.utils.files import read_json

GIB = 1 << 30


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.fixture
def small() -> ModelSettings:
    return ModelSettings(
        dtypes=("bfloat16",), lengths=(16, 24), contexts=(20,), hidden_size=32, intermediate_size=48, layers=2,
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
    assert (on_cuda.for_check.layers, on_cuda.for_check.vocabulary) == (1, 8192)
    assert ModelSettings.on("cuda", batch=3).batch_of(STEP, 2048) == 3
    assert ModelSettings.on("cuda", compile=True).passes == ("forward", "step")
    with pytest.raises(ValueError, match="compile does not go with the pass 'decode'"):
        ModelSettings.on("cuda", compile=True, passes=("decode",))
    with pytest.raises(ValueError, match="layers must be a number, got None"):
        ModelSettings(layers=None)


def test_as_many_layers_as_fit(believed: None) -> None:
    on_cuda = ModelSettings.on("cuda")
    counts = [layers_that_fit(on_cuda, torch.bfloat16, gibi * GIB) for gibi in (1, 48, 80, 139, 1000)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, PAPER_LAYERS)
    # By hand for 139 GiB: 5 models of 6 bytes a weight, the gradients of one, activations and logits of 4096 tokens.
    layer, ends, free = 4 * 3072**2 + 3 * 3072 * 8192, 2 * 100_288 * 3072, 0.85 * 139 * GIB
    fixed, each = 32 * ends + 4096 * 100_288 * 14, 32 * layer + 4096 * (20 * 3072 + 4 * 8192) * 2
    assert counts[3] == int((free - fixed) / each)
    assert counts[3] > 16
    two = dataclasses.replace(on_cuda, candidates=("diff",))
    assert layers_that_fit(two, torch.bfloat16, 139 * GIB) == PAPER_LAYERS
    assert layers_that_fit(two, torch.float32, 48 * GIB) < layers_that_fit(two, torch.bfloat16, 48 * GIB)


@pytest.mark.parametrize(("most", "layers"), [(9, [28, 21, 15, 11, 8]), (0, None)])
def test_layers_go_until_a_step_fits(
    believed: None, small: ModelSettings, monkeypatch: pytest.MonkeyPatch, most: int, layers: list[int] | None
) -> None:
    tried: list[int | None] = []

    def too_large(chosen: ModelSettings, dtype: torch.dtype) -> Any:
        tried.append(chosen.layers)
        if (chosen.layers or 0) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {}

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 * GIB, 139 * GIB))
    monkeypatch.setattr(model_bench, "_stepped_models", too_large)
    open_ended = dataclasses.replace(small, device="cuda", layers=None)
    if layers is None:
        with pytest.raises(ValueError, match="one layer of every model is too much here: it does not fit"):
            model_bench._models(open_ended, torch.bfloat16)
    else:
        assert model_bench._models(open_ended, torch.bfloat16)[0].layers == layers[-1]
        assert tried == layers


def test_every_model_steps_beside_the_others(small: ModelSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, int]] = []

    def noted(built: Any, pass_: str, length: int, chosen: ModelSettings) -> Any:
        return lambda: steps.append((pass_, length))

    monkeypatch.setattr(model_bench, "timed_pass", noted)
    assert list(model_bench._stepped_models(small, torch.bfloat16)) == ["softmax", "diff"]
    assert steps == [(STEP, 24)] * 2
    model_bench._stepped_models(dataclasses.replace(small, passes=("forward",)), torch.bfloat16)
    assert len(steps) == 2


def test_results_are_checked_on_fewer_layers(
    small: ModelSettings, notes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    built: list[tuple[int | None, int]] = []
    build = model_bench.build

    def noted(name: str, chosen: ModelSettings) -> Any:
        built.append((chosen.layers, chosen.vocabulary))
        return build(name, chosen)

    monkeypatch.setattr(model_bench, "build", noted)
    document, rows = measure_model(dataclasses.replace(small, check_layers=1, check_vocabulary=30), notes)
    assert built == [(1, 30)] * 2 + [(2, 50)] * 2
    assert document["notes"] == ["Results were checked with 1 of the layers and a vocabulary of 30."]
    assert [done for _, done, _ in notes.stages] == list(range(notes.stages[0][2]))
    assert {(row.pass_, row.shape["length"]) for row in rows} == {
        (FORWARD, 16), (FORWARD, 24), (STEP, 16), (STEP, 24), (DECODE, 20)
    }  # fmt: skip
    for row in rows:
        assert row.shape["layers"] == 2
        assert row.milliseconds is not None
        tokens = row.shape["batch"] * (1 if row.pass_ == DECODE else row.shape["length"])
        assert row.tokens_per_second == pytest.approx(tokens / row.milliseconds * 1e3)
    assert " tokens/s" in row_line(rows[0])
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
    _, rows = measure_model(dataclasses.replace(small, passes=("forward",), lengths=(16,)), notes)
    assert {row.candidate for row in rows if row.ratio is not None} == timed
    assert {row.candidate: row.reason for row in rows}[lost] == NO_MEMORY


def test_layers_are_compiled_where_it_is_asked_for(small: ModelSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: (function, options))
    built = model_bench.build("diff", small)
    assert in_dtype(built, torch.bfloat16, small).get_submodule("model")._compiled_call_impl is None
    compiled = in_dtype(built, torch.bfloat16, dataclasses.replace(small, compile=True, passes=("step",)))
    assert compiled is built
    stack = compiled.get_submodule("model")
    assert stack._compiled_call_impl == (stack._call_impl, {"dynamic": False})


def test_the_threshold_of_cuda_is_the_step_at_4096() -> None:
    def row(ratio: float, length: int = 4096, candidate: str = "diff", pass_: str = STEP) -> BenchRow:
        return BenchRow(candidate=candidate, pass_=pass_, dtype="bfloat16", shape={"length": length}, ratio=ratio)

    rows = [row(1.02), row(2.0, length=2048), row(2.0, candidate="diff, sdpa"), row(2.0, pass_=FORWARD)]
    (one,) = model_bench.step_thresholds(rows, on_cuda=True)
    assert (one.text, one.limit, one.worst, one.holds) == ("training step, bfloat16, length 4096", 1.03, 1.02, True)
    assert [one.holds for one in model_bench.step_thresholds([row(1.04)], on_cuda=True)] == [False]
