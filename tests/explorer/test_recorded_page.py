"""What a saved page holds, and what it is too large for; tests/explorer/test_page.py opens it in a browser."""

import base64
import json
import re
from typing import Any

import pytest

from decoded_maps import decode_maps
from diff_transformer.explorer import Example, ExploredModel, Explorer, Side, page
from explored_models import ANSWER, TEXT, make


def data_of(page: str) -> dict[str, Any]:
    return json.loads(re.findall(r'id="explorer-data">(.*?)</script>', page)[0])


def test_it_holds_a_run_for_each_step_of_lambda_and_for_each_token(explorer: Explorer) -> None:
    left = data_of(page.recorded_page(explorer))["recorded"]["left"]
    assert len(left["tokens"]) == len(left["pieces"]) == 11 + page.WRITTEN
    assert [run["loss"] for run in left["runs"]] == [
        pytest.approx(explorer.run({"text": TEXT, "append": left["tokens"][11 : 11 + count]})["loss"], rel=1e-4)
        for count in range(page.WRITTEN + 1)
    ]
    assert decode_maps(base64.b64decode(left["maps"]["2.4"]))[0].first.shape == (1, 27, 27)
    assert sorted(left["moved"]) == sorted(
        ["factor", "1", "2", *(f"{layer}.{head}" for layer in "12" for head in "1234")]
    )
    for place, lambdas in (
        ("factor", {"factor": 0.5}),
        ("2", {"layers": {"2": 0.5}}),
        ("2.3", {"heads": {"2.3": 0.5}}),
    ):
        (step,) = [step for step in left["moved"][place] if step["value"] == 0.5]
        expected = explorer.run({"text": TEXT, "lambdas": lambdas, "answer": ANSWER})
        for name in ("loss", "divergence", "answer_share", "answer_probability"):
            assert step["run"][name] == pytest.approx(expected[name], rel=1e-4)


def test_heads_of_a_model_with_many_are_not_moved_one_by_one(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_HEADS", 7)
    recorded = data_of(page.recorded_page(explorer))["recorded"]
    assert sorted(recorded["left"]["moved"]) == ["1", "2", "factor"]
    assert recorded["right"]["moved"] == {}


def test_what_it_refuses(explorer: Explorer) -> None:
    with pytest.raises(ValueError, match="A page needs a text"):
        page.recorded_page(Explorer(explorer.sides["left"]))
    side = Side(ExploredModel(make("diff", max_position_embeddings=1600), "long"), explorer.sides["left"].vocabulary)
    with pytest.raises(ValueError, match=r"The maps of 1,516 tokens take .* MB; give a shorter --text"):
        page.recorded_page(Explorer(side, examples=[Example("a text", "w1 " * 1500)]))
