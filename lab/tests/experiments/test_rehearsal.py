"""Every experiment's gpu preset from its checks to its report, small and on the CPU; and what a rehearsal keeps."""

import math
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from corpora import written
from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment
from diff_lab.experiments.experiment import PASSES, Preset, text_notes
from diff_lab.experiments.request import DatasetCache, ExperimentRequest, as_defined, check_preset, results_path
from diff_lab.measure import gradients
from diff_lab.report.pages import build_results_report
from diff_lab.results_files import read_results
from diff_lab.train import Progress, build_data, build_model, load_recipe
from diff_lab.train.plan import Plan
from full_run import short_run
from rehearsal import rehearse, rehearsed, request_anywhere
from small_experiment import TINY

# Text that is trained on in two variants, and variants in several sizes or with data of their own.
FEW = ["table5", "noise"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source with documents of 8192 tokens, also among the fifth of them that is held out."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size)
    written([source.read_text(encoding="utf-8") for source in sources[-24:]], folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: experiments that train the same find each other's runs."""
    return tmp_path_factory.mktemp("output")


def requested(name: str, text: Path, preset: str = "gpu") -> ExperimentRequest:
    found = find_experiment(name)
    paths = [text] if found.presets[preset].trains_on_text else []
    return request_anywhere(found, preset, paths)


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated")  # torch's own, where it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # as above
@pytest.mark.all
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_gpu_preset_from_its_checks_to_its_report(name: str, text: Path, output: Path, tmp_path: Path) -> None:
    request = requested(name, text)
    results = rehearse(request, output, Progress())
    path = results_path(output, name)
    assert results == as_defined(read_results(path), request.experiment)
    assert results.comparisons
    if results.headline is not None:
        about = (results.headline.name, results.headline.variant, results.headline.against)
        assert about in {(one.name, one.variant, one.against) for one in results.comparisons}
    for variant, entry in zip(request.preset.variants, results.settings["variants"], strict=True):
        assert entry["name"] == variant.name
        assert list(entry["runs"]) == ["0", "1"]
        assert entry["diverged"] == []
    assert all(math.isfinite(record.value) for record in results.records)
    document = build_results_report([path], tmp_path / "RESULTS.md", as_defined)
    assert "preset gpu" in document.read_text(encoding="utf-8")
    if request.preset.variants:
        check_what_is_kept(request)


def tokens(preset: Preset) -> int:
    """Of all trainings."""
    total = 0
    for variant in preset.variants:
        for stage, number in (((), preset.seeds), (preset.sweep, len(preset.learning_rates)), (preset.extension, 1)):
            recipe = preset.variant_recipe(variant, *stage)
            total += number * recipe.train.steps * recipe.data.batch_size * recipe.data.length
    return total


def check_what_is_kept(request: ExperimentRequest) -> None:
    small = rehearsed(request)
    before, after = request.preset, small.preset
    assert tokens(after) < 1e-3 * tokens(before)
    assert (bool(after.sweep), bool(after.extension)) == (bool(before.sweep), bool(before.extension))
    assert len(after.learning_rates) == min(2, len(before.learning_rates))
    assert [one.name for one in small.experiment.requests(after)] == [
        one.name for one in request.experiment.requests(before)
    ]
    for variant, smaller in zip(before.variants, after.variants, strict=True):
        assert (variant.name, variant.coordinates) == (smaller.name, smaller.coordinates)
        full, tiny = before.variant_recipe(variant), after.variant_recipe(smaller)
        assert tiny.train.precision == full.train.precision
        assert type(tiny.data) is type(full.data)
        model, tiny_model = (recipe.model.model_dump() for recipe in (full, tiny))
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
        assert {key for key in model if model[key] != tiny_model[key]} <= set(sizes)
        assert tiny.model.heads == full.model.heads
        # Validation curves have more than one point, or there are none.
        assert full.train.evaluate_every is not None
        assert full.train.evaluate_every <= full.train.steps / 8


@pytest.mark.parametrize("name", short_run(EXPERIMENTS, FEW))
def test_every_training_of_a_gpu_preset_fits_one_h200(name: str) -> None:
    preset = find_experiment(name).presets["gpu"]
    for variant in preset.variants:
        stages = [preset.variant_recipe(variant, *stage) for stage in ((), preset.sweep, preset.extension)]
        for recipe in {(repr(stage.model), repr(stage.data)): stage for stage in stages}.values():
            assert Plan(recipe, "h200").chosen


def test_data_that_a_preset_has_no_use_for_fail_first(text: Path, tmp_path: Path) -> None:
    short = written(["A sheep jumps over the fence. " * 40] * 8, tmp_path)
    folder = Path(short.files()[0]).parent
    with pytest.raises(ValueError, match="The validation part of the corpus has 456 tokens"):
        rehearse(requested("fig4", folder), tmp_path / "output", Progress())
    assert not (tmp_path / "output").exists()


def test_a_text_that_is_read_often_is_told(text: Path) -> None:
    def notes(steps: int, *overrides: str) -> list[str]:
        recipe = load_recipe("language", [f"data.paths={text}", f"train.steps={steps}", *overrides])
        return text_notes(recipe, build_data(recipe).batches)

    recipe = load_recipe("language", [f"data.paths={text}"])
    batches: Any = build_data(recipe).batches
    once = batches.train_tokens / (recipe.data.batch_size * recipe.data.length)
    assert notes(int(PASSES * once)) == []
    (note,) = notes(round(7 * once))
    assert f"{batches.train_tokens:,} tokens 7 times" in note
    assert "--text" in note
    retrieval = load_recipe("retrieval")
    assert text_notes(retrieval, build_data(retrieval).batches) == []


def test_a_rehearsal_tells_it_of_the_preset_itself(text: Path) -> None:
    (note,) = check_preset(requested("table5", text), DatasetCache())[1]
    assert re.search(r"[\d,]+ tokens \d\d+ times", note)


def test_gradients_do_not_go_through_what_validation_has_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast before torch 2.11 keeps weights that it has cast without gradients."""
    calls: list[str] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: calls.append("cleared"))
    recipe = load_recipe("retrieval", TINY.overrides)
    data = build_data(recipe)
    model = build_model(recipe, data)
    model.register_forward_hook(lambda *_: calls.append("forward"))
    gradients.gradient_callback(data.batches, 2)(model, 1)
    assert calls == ["cleared", "forward"]
