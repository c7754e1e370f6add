"""The measurement of narrow heads: what it writes, and that it times nothing that is wrong."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_transformer.ops.cpu.cpu_backend import reason_against_cpu_kernel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(reason_against_cpu_kernel() is not None, reason="needs the kernel")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With few tokens."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import narrow_heads  # type: ignore[import-not-found]

    monkeypatch.setattr(narrow_heads, "TOKENS", 1024)
    monkeypatch.setattr(narrow_heads, "HEADS", 2)
    threads = torch.get_num_threads()
    yield narrow_heads
    torch.set_num_threads(threads)
    del sys.modules["narrow_heads"]


def test_it_measures_every_shape_dtype_and_form(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    monkeypatch.setattr(sys, "argv", ["narrow_heads.py", "--rounds", "2", "--output", str(output)])
    program.main()
    records = json.loads(output.read_text(encoding="utf-8"))["records"]
    found = {(one["name"], one["coordinates"]["width"], one["coordinates"]["length"]) for one in records}
    names = [f"{form}, {dtype}" for form in program.FORMS for dtype in ("float32", "bfloat16")]
    assert found == set(itertools.product(names, (8, 16), (64, 128, 256, 1024)))
    assert all(one["value"] > 0 and one["n"] == 2 for one in records)
    assert capsys.readouterr().out.count(" of ") >= len(records)


@pytest.mark.parametrize("form", ["causal", "full", "padded"])
def test_a_wrong_answer_is_not_timed(program: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = program.narrow_attention
    monkeypatch.setattr(program, "narrow_attention", lambda *q_k_v, **settings: 1.001 * right(*q_k_v, **settings))
    monkeypatch.setattr(program, "seconds", lambda *_: pytest.fail("it is timed"))
    with pytest.raises(SystemExit, match=r"the kernel is off by .* nothing is timed"):
        program.measure(64, 8, torch.float32, form, 2)
