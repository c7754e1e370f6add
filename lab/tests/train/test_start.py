"""A run that starts from a model's weights, and what cannot be started from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from diff_lab.data import byte_tokenizer
from diff_lab.train import Data, Recipe, TrainingInterrupted, build_data, build_model, load_recipe, train
from diff_lab.train.checkpoint import save_model
from diff_lab.train.run_setup import check_init_from, check_run_folder
from diff_transformer.model import DiffTransformerForCausalLM
from small_runs import Watcher, small_recipe

MODEL = {"intermediate_size": 24}


def recipe(**model: object) -> Recipe:
    return small_recipe(model={**MODEL, **model}, steps=1)


@pytest.fixture
def data() -> Data:
    return build_data(recipe())


def saved(folder: Path, data: Data, **settings: object) -> DiffTransformerForCausalLM:
    """A model with weights of its own, written to a folder."""
    model = build_model(recipe(**settings), data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    save_model(folder, model, None)
    return model


@pytest.fixture
def trained(data: Data, tmp_path: Path) -> tuple[Path, DiffTransformerForCausalLM]:
    return tmp_path / "model", saved(tmp_path / "model", data)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_the_folders_and_positions_the_recipes(
    data: Data, tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(tmp_path / "model", data, tie_word_embeddings=tied)
    monkeypatch.setenv("HOME", str(tmp_path))
    positions = {"rope_theta": 640000.0, "max_position_embeddings": 128}
    longer = recipe(tie_word_embeddings=tied, init_from="~/model", **positions)
    assert check_init_from(longer) == tmp_path / "model"
    model = build_model(longer, data)
    assert model.training
    assert model.config.rope_parameters["rope_theta"] == 640000.0
    assert model.config.max_position_embeddings == 128
    theirs = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs.pop(name)), name
    assert not theirs
    fresh = build_model(recipe(rope_theta=640000.0), data).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh)
    assert not torch.equal(fresh, before.model.rotary_emb.inv_freq)


def test_weights_of_half_precision_become_float32(data: Data, trained: tuple[Path, DiffTransformerForCausalLM]) -> None:
    folder, model = trained
    save_model(folder, model.bfloat16(), None)
    loaded = build_model(recipe(init_from=str(folder)), data)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.float())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"attention_type": "softmax"}, "needs model.attention_type=diff (it has softmax), model.headwise_norm=true"),
        ({"hidden_size": 32}, "needs model.hidden_size=16 (it has 32)"),
        ({"num_hidden_layers": 3}, "needs model.num_hidden_layers=2 (it has 3)"),
        ({"lambda_init": 0.8}, "needs model.lambda_init=schedule (it has 0.8)"),
        ({"rms_norm_eps": 1e-6}, "needs model.rms_norm_eps=1e-05 (it has 1e-06)"),
        ({"headwise_norm": False}, "needs model.headwise_norm=true (it has false)"),
        ({"vocab_size": 1024}, "needs model.vocab_size=17 (it has 1024)"),
    ],
)
def test_what_the_recipe_needs_is_named_without_data(
    trained: tuple[Path, DiffTransformerForCausalLM], setting: dict[str, object], message: str
) -> None:
    """All of it, as overrides that make the recipe one that can start there."""
    start = recipe(init_from=str(trained[0]), **setting)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        check_init_from(start)
    assert str(trained[0]) in str(raised.value)
    path = trained[0].parent / "recipe.yaml"
    path.write_text(json.dumps(start.model_dump(mode="json")), encoding="utf-8")
    check_init_from(load_recipe(path, re.findall(r"(model\.(?!norm_eps_in)\S+=\S+) \(", str(raised.value))))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention_type", "dex", "needs model.attention_type=dex (it has diff)"),
        ("hidden_act", "poly_norm", "needs model.hidden_act=poly_norm (it has silu). A model with settings that no"),
        ("attention_norm_eps", 1e-3, "needs model.norm_eps_in_attention=0.001 (it has 1e-05)"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "needs model.rope_type=linear"),
    ],
)
def test_what_no_recipe_has_is_named(
    trained: tuple[Path, DiffTransformerForCausalLM], name: str, value: object, message: str
) -> None:
    settings = json.loads((trained[0] / "config.json").read_text(encoding="utf-8"))
    (trained[0] / "config.json").write_text(json.dumps(settings | {name: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        check_init_from(recipe(init_from=str(trained[0])))


def test_a_fixed_lambda_does_not_go_with_loaded_weights(trained: tuple[Path, DiffTransformerForCausalLM]) -> None:
    with pytest.raises(ValueError, match=r"^model\.fixed_lambda does not go with model\.init_from: .*\.$"):
        check_init_from(recipe(init_from=str(trained[0]), fixed_lambda=True))


def test_another_vocabulary(data: Data, trained: tuple[Path, DiffTransformerForCausalLM]) -> None:
    folder, model = trained
    model.resize_token_embeddings(1024)
    model.save_pretrained(folder)
    unless_given = recipe(init_from=str(folder))
    check_init_from(unless_given)  # the vocabulary is known with the data
    with pytest.raises(ValueError, match=r"needs model\.vocab_size=1024 \(it has \d+\)"):
        build_model(unless_given, data)


def test_other_tokens_of_the_same_number(data: Data, trained: tuple[Path, DiffTransformerForCausalLM]) -> None:
    folder, _ = trained
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    same = recipe(init_from=str(folder))
    assert build_model(same, Data(data.batches, tokenizer)).generation_config.pad_token_id == 256
    extended = byte_tokenizer()
    extended.add_tokens(["<another>"])
    with pytest.raises(ValueError, match="has a tokenizer of its own, with other tokens than the recipe's"):
        build_model(same, Data(data.batches, extended))


def test_folders_that_hold_no_such_model(data: Data, trained: tuple[Path, DiffTransformerForCausalLM]) -> None:
    folder, _ = trained
    for nothing in (folder / "gone", folder.parent):
        with pytest.raises(FileNotFoundError, match=r"holds no model: it must be a folder with config\.json"):
            check_init_from(recipe(init_from=str(nothing)))
        with pytest.raises(FileNotFoundError, match="holds no model"):  # before any text is read
            check_run_folder(folder.parent / "run", recipe(init_from=str(nothing)), resume=False, overwrite=False)
    start = recipe(init_from=str(folder))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    check_init_from(start)
    with pytest.raises(ValueError, match="the weights cannot be loaded"):
        build_model(start, data)
    tensors = load(weights)
    del tensors["model.layers.1.self_attn.lam.q1"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold the model's weights; wrong is 'model\.layers\.1\.self_attn"):
        build_model(start, data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="holds a model of type 'llama'"):
        check_init_from(start)
    (folder / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        check_init_from(start)


def test_a_run_goes_on_from_another_ones_model_and_resumes_without_it(tmp_path: Path) -> None:
    def settings(rate: float = 1e-2, **model: Any) -> Recipe:
        every = {"inspect_every": None, "checkpoint_every": 1}
        return small_recipe(model=MODEL | model, steps=2, learning_rate=rate, **every)

    first = train(settings(), tmp_path / "first")
    longer = {"init_from": str(first.model_folder), "rope_theta": 640000.0, "max_position_embeddings": 64}
    still = train(settings(1e-30, **longer), tmp_path / "still").model  # nothing is learned
    for parameter, start in zip(still.parameters(), first.model.parameters(), strict=True):
        assert torch.allclose(parameter, start, rtol=1e-6, atol=1e-7)
    uninterrupted = train(settings(**longer), tmp_path / "whole").model
    with pytest.raises(TrainingInterrupted):
        train(settings(**longer), tmp_path / "half", progress=Watcher(interrupt_after=1))
    (tmp_path / "first").rename(tmp_path / "moved")
    resumed = train(settings(**longer), tmp_path / "half", resume=True).model
    torch.testing.assert_close([*resumed.parameters()], [*uninterrupted.parameters()], rtol=0, atol=0)
