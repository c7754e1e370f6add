import dataclasses
import functools
from typing import Any

import pytest
import torch

from diff_lab.bench.bench_pages import page
from diff_lab.bench.benchmark import DECODE, FORWARD, STEP, refuse_wrong
from diff_lab.bench.model_bench import MODELS, ModelSettings, build, cast, decode_run, measure_model, tokens_of
from diff_lab.results_files import write_json
from diff_transformer.nn import differential
from diff_transformer.utils.files import read_json

CTRANSLATE2 = "CTranslate2"
MISSING = "ModuleNotFoundError: it is not installed: pip install ctranslate2"


@pytest.fixture
def small() -> ModelSettings:
    return ModelSettings(
        hidden_size=32, intermediate_size=48, layers=2, head_dim=8, vocabulary=50, lengths=(24,), rounds=5
    )


def test_a_run_has_every_model_in_every_pass(
    small: ModelSettings, notes: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    document = measure_model(small, notes)
    rows = document["rows"]
    assert rows == notes.rows
    assert notes.lines[0] == "part 1 of 10: check, forward, 24 tokens"
    assert notes.lines[-1] == "part 10 of 10: decode, int8, 24 tokens"
    timed = {(row.candidate, row.pass_, row.dtype, row.against) for row in rows}
    cases = [(pass_, dtype) for pass_ in (FORWARD, STEP, DECODE) for dtype in ("float32", "bfloat16")]
    cases.append((DECODE, "int8"))
    decoders = {"diff, compiled", "Llama, compiled", CTRANSLATE2}
    assert timed == {(name, *case, "softmax") for name in set(MODELS) - decoders for case in cases} | {
        *((name, *case, "softmax") for name in decoders for case in cases if DECODE in case),
        *((name, *case, "Llama") for name in ("diff", "DiffLlama") for case in cases),
        *(("diff, compiled", *case, "Llama, compiled") for case in cases if DECODE in case),
        *(
            (name, row.pass_, row.dtype, CTRANSLATE2)
            for name in ("diff", "diff, compiled")
            for row in rows
            if row.candidate == CTRANSLATE2 and row.ratio
        ),
    }
    for row in rows:
        if row.candidate == CTRANSLATE2 and row.reason is not None:
            assert row.reason == MISSING or row.dtype == "bfloat16", row.reason
            continue
        assert row.error is not None
        assert row.error < 1
        assert row.ratio is not None
        assert row.shape["length"] == 24
    # DIFF and the Transformer differ by the λ vectors and the headwise norm of each layer.
    sizes = document["parameters"]
    assert sizes["diff"] - sizes["softmax"] == 2 * (4 * 8 + 2 * 8)
    assert sizes["softmax"] == sizes["Llama"] == build("softmax", small).num_parameters()
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


@pytest.mark.parametrize("name", ["diff", "Llama", "diff, compiled", "Llama, compiled", CTRANSLATE2])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoded_token_has_the_logits_of_the_whole_text(
    small: ModelSettings, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == CTRANSLATE2:
        pytest.importorskip("ctranslate2", reason="it is in the environment of `make bench-anchors` alone")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    small = dataclasses.replace(small, batch=batch)
    model, tokens = build(name, small), tokens_of(small, DECODE, 24)
    decode = decode_run(name, model, tokens, "float32")
    with torch.no_grad():
        whole = model(tokens).logits[:, -1:]
    for _ in range(2):  # the cache is as before
        torch.testing.assert_close(decode(), whole, atol=2e-6, rtol=2e-5)
    if name == CTRANSLATE2:
        assert decode.seconds(2) > 0  # type: ignore[attr-defined]


def test_int8_is_for_decoding_and_takes_the_head_too(small: ModelSettings) -> None:
    model = cast(build("diff", small), "int8")
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert model.lm_head.weight.dtype == torch.int8
    with pytest.raises(ValueError, match="dtype int8 is for the pass decode alone, got forward, step"):
        ModelSettings(dtypes=("int8",), passes=("forward", "step"))


def test_an_unknown_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"candidate must be one of 'softmax', 'diff', .* got 'auto'"):
        ModelSettings(candidates=("auto",))
