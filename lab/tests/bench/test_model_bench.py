import dataclasses
from typing import Any

import pytest
import torch

from diff_lab.bench.bench_pages import page
from diff_lab.bench.benchmark import DECODE, FORWARD, STEP, refuse_wrong
from diff_lab.bench.model_bench import MODELS, ModelSettings, build, measure_model
from diff_lab.results_files import write_json
from diff_transformer.nn import differential
from diff_transformer.utils.files import read_json


@pytest.fixture
def small() -> ModelSettings:
    return ModelSettings(
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        head_dim=8,
        vocabulary=50,
        lengths=(24,),
        rounds=5,
    )


def test_a_run_has_every_model_in_every_pass(small: ModelSettings, notes: Any, tmp_path: Any) -> None:
    document = measure_model(small, notes)
    rows = document["rows"]
    assert rows == notes.rows
    assert notes.lines[0] == "part 1 of 9: check, forward, 24 tokens"
    assert notes.lines[-1] == "part 9 of 9: decode, bfloat16, 24 tokens"
    timed = {(row.candidate, row.pass_, row.dtype, row.against) for row in rows}
    cases = [(pass_, dtype) for pass_ in (FORWARD, STEP, DECODE) for dtype in ("float32", "bfloat16")]
    assert timed == {(name, *case, "softmax") for name in MODELS for case in cases} | {
        ("DiffLlama", *case, "Llama") for case in cases
    }
    for row in rows:
        assert row.error is not None
        assert row.error < 1
        assert row.ratio is not None
        assert row.shape["length"] == 24
    # DIFF and the Transformer differ by the λ vectors and the headwise norm of each layer.
    sizes = document["parameters"]
    assert sizes["diff"] - sizes["softmax"] == 2 * (4 * 8 + 2 * 8)
    assert sizes["softmax"] == sizes["Llama"]
    text = page(read_json(write_json(tmp_path / "model.json", document)))
    assert f"{sizes['diff']:,} parameters" in text
    assert "DiffLlama / Llama" in text


def test_a_wrong_model_gets_no_time(small: ModelSettings, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = differential.diff_attention

    def wrong(*args: Any, backend: str, **settings: Any) -> torch.Tensor:
        out = right(*args, backend=backend, **settings)
        # Only the last token: what a decoding step computes.
        return torch.cat((out[:, :, :-1], -out[:, :, -1:]), dim=2) if backend == "auto" else out

    monkeypatch.setattr(differential, "diff_attention", wrong)
    settings = dataclasses.replace(small, dtypes=("float32",), passes=("forward", "decode"), candidates=("diff",))
    measure_model(settings, notes)
    rows = notes.rows
    timed = [row for row in rows if row.candidate == "diff"]
    assert [(row.ratio, row.reason) for row in timed] == [(None, "its results are wrong")] * 2
    assert [row.ratio for row in rows if row.candidate == "softmax"] == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"diff \(forward, float32"):
        refuse_wrong(rows)


def test_all_models_start_with_weights_that_bfloat16_holds(small: ModelSettings) -> None:
    built = build("diff", small)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in built.parameters())


def test_building_leaves_the_random_numbers_as_they_are(small: ModelSettings) -> None:
    state = torch.get_rng_state()
    build("softmax", small)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unknown_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"candidate must be one of 'softmax', 'diff', .* got 'auto'"):
        ModelSettings(candidates=("auto",))
