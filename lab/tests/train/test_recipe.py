"""Recipes are strict, and say what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from diff_lab.data import byte_tokenizer
from diff_lab.train import build_config, load_recipe, parse_recipe, run_setup, shipped_recipes
from diff_lab.train.recipe import TextData, differences, dump_recipe, override_of, read_yaml
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import DiffTransformerConfig, language_model_class
from tiny_model import KINDS

RECIPE = """
name: test
model: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, head_dim: 8}
data: {kind: retrieval}
train: {steps: 3, learning_rate: 2e-3, precision: no}
"""
KINDS_LISTED = "'text', 'masked_text', 'retrieval', 'recall', 'many_shot', 'arithmetic'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the callers look at the message
        load_recipe(path, overrides)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
@pytest.mark.parametrize("attention_type", KINDS)
def test_every_shipped_recipe_loads_and_builds_its_config(name: str, attention_type: str) -> None:
    overrides = [f"model.attention_type={attention_type}"]
    if ATTENTION_TYPES[attention_type].grouped and not ATTENTION_TYPES[attention_type].latent:
        with pytest.raises(ValueError, match="needs num_noise_heads, the number of groups"):
            load_recipe(name, overrides)
        overrides.append("model.num_noise_heads=1")
    recipe = load_recipe(name, overrides)
    assert recipe.name == name
    tokenizer = byte_tokenizer() if isinstance(recipe.data, TextData) else None
    config = build_config(recipe, 257, tokenizer)
    assert config.attention_type == attention_type
    assert (config.num_attention_heads, config.head_dim) == (recipe.model.heads, recipe.model.head_dim)
    assert config.max_position_embeddings == recipe.data.length
    assert config.eos_token_id == (256 if tokenizer else None)
    assert config.is_causal == (name != "masked")
    if config.hidden_size <= 128:
        language_model_class(config)(config)


def test_options_of_attention_reach_the_model(path: Path) -> None:
    given: dict[str, Any] = {
        "qk_clip": True,
        "exclusive_attention": True,
        "layers_without_rotary": [1],
        "dual_lambda": True,
    }
    config = build_config(load_recipe(path, [f"model.{name}={value}".lower() for name, value in given.items()]), 257)
    assert given == {name: getattr(config, name) for name in given}
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
    latent = [f"model.{name}={size}" for name, size in sizes.items()]
    latent += ["model.attention_type=gdla", "model.head_dim=16", "model.num_attention_heads=4"]
    config = build_config(load_recipe(path, latent), 257)
    assert sizes == {name: getattr(config, name) for name in sizes}


def test_every_setting_of_a_model_is_compared_with_one_to_start_from() -> None:
    """But for those that no weight and no output of a trained model depends on, or that `rope_parameters` has."""
    others = set(DiffTransformerConfig.__annotations__) - {*run_setup._SHARED_SETTINGS, *run_setup._FREE_SETTINGS}
    tokens, dex = {"bos_token_id", "eos_token_id", "pad_token_id"}, {"dex_heads", "dex_lambda_start"}
    # attention_norm_eps is compared as norm_eps_in_attention, and is_causal is a matter of the data.
    assert others == tokens | dex | {"attention_norm_eps", "is_causal", "rope_parameters", "use_cache"}


def test_numbers_and_words_are_read_as_people_mean_them(path: Path) -> None:
    recipe = load_recipe(path, ["train.eps=1e-9", "train.weight_decay=0", "train.schedule=cosine"])
    assert recipe.train.learning_rate == 2e-3
    assert recipe.train.precision == "no"
    assert recipe.train.eps == 1e-9
    assert recipe.train.weight_decay == 0
    assert recipe.model.lambda_init == "schedule"
    assert load_recipe(path, ["model.lambda_init=0.8"]).model.lambda_init == 0.8


def test_the_former_name_of_init_from_is_read(tmp_path: Path) -> None:
    text = shipped_recipes()["paper-3b-64k"].read_text().replace("init_from:", "start_from:")
    assert "start_from:" in text
    former = tmp_path / "former.yaml"
    former.write_text(text)
    recipe = load_recipe("paper-3b-64k")
    assert load_recipe(former) == recipe
    assert "start_from" not in dump_recipe(load_recipe(former))
    assert load_recipe(former, ["model.init_from=other"]).model.init_from == "other"
    assert load_recipe(read_yaml(text)) == recipe


def test_a_dumped_recipe_is_read_back_as_it_was(path: Path, tmp_path: Path) -> None:
    for recipe in (load_recipe(path), load_recipe("small"), load_recipe("language")):
        (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize(
    "name", ["1e-3", "123e456", ".5", "no", "true", "null", "012", "1:30", "📚 a: b", "<<", '\\ud83d "é"']
)
def test_a_name_that_looks_like_something_else_is_read_back_as_text(name: str, path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [override_of("name", name), override_of("model.init_from", f"{name}/model")])
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "dumped.yaml") == recipe
    assert (recipe.name, recipe.model.init_from) == (name, f"{name}/model")


def test_differences_are_named(path: Path) -> None:
    first, second = load_recipe(path), load_recipe(path, ["train.steps=4", "model.attention_type=softmax"])
    assert differences(first, first) == []
    assert differences(first, second) == ["model.attention_type ('diff', 'softmax')", "train.steps (3, 4)"]
    text = differences(first, load_recipe("tiny"))
    assert "data.num_pairs (4, 'absent')" in text


@pytest.mark.parametrize(
    ("override", "wrong", "right"),
    [
        ("train.step=5", "train.step", "train.steps"),
        ("data.lenght=64", "data.lenght", "data.length"),
        ("steps=5", "steps", "train.steps"),  # the right key in the wrong place
        ("train.head_dim=8", "train.head_dim", "model.head_dim"),
        ("trian.steps=5", "trian", "train"),
        ("train={stpes: 5}", "train.stpes", "train.steps"),  # rather than the key that it leaves missing
    ],
)
def test_an_unknown_key_names_the_nearest(path: Path, override: str, wrong: str, right: str) -> None:
    assert refusal(path, override).endswith(f"unknown key {wrong!r}; did you mean {right!r}?")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=many", "'train.steps' is 'many'"),
        ("train.xyzzy=1", "unknown key 'train.xyzzy'; allowed are 'train.steps', "),
        ("train.steps=0", "'train.steps' is 0; input should be greater than or equal to 1"),
        ("train.steps=true", "'train.steps' is True"),
        ("train.learning_rate=.inf", "'train.learning_rate' is inf"),
        ("train.precision=fp8", "'train.precision' is 'fp8'; input should be 'no', 'bf16' or 'fp16'"),
        ("model.head_dim=12", "hidden_size=32 is not a multiple of head_dim=12"),
        ("model.head_dim=null", "give head_dim or num_attention_heads"),
        ("model.max_position_embeddings=64", "model.max_position_embeddings=64 is shorter than data.length=128"),
        ("data.kind=txt", f"'data.kind' is one of {KINDS_LISTED}, got 'txt'"),
        ("data={}", f"'data.kind' is one of {KINDS_LISTED}, got None"),
        ("data={kind: text, length: 8, batch_size: 2, vocab_size: 300}", 'vocab_size is given with tokenizer "bpe"'),
        ("train.accumulation=5", "train.accumulation=5 does not divide data.batch_size=32"),
        ("train={learning_rate: 1}", "'train.steps' is missing"),
        ("train.steps", "'train.steps' is not an override"),
        ("data.paths=", "'data.paths=' is not an override"),  # an empty variable of a shell; null is the library's text
        ("name.first=x", "'name' is a setting, not a section"),
        ("train.steps=[1", "not valid YAML"),
        ("model.lambda_init=foo", "'model.lambda_init' is 'foo'; allowed are 'schedule' or a number."),
        ("model.num_key_value_heads=3", "num_key_value_heads"),
        ("model.head_dim=1", "head_dim must be even"),
        ("train.seed=100000000000000000000000", "'train.seed' is 100000000000000000000000; input should be less than"),
        ("model.hidden_size=" + "[" * 600, "not valid YAML"),
    ],
)
def test_a_wrong_value_is_named(path: Path, override: str, expected: str) -> None:
    assert expected in refusal(path, override)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="no recipe 'retrieva'; shipped ones are 'arithmetic', 'language', 'masked', 'paper-"
    ):
        load_recipe("retrieva")
    file = tmp_path / "recipe.yaml"
    for text, message in [
        ("name: [", "not valid YAML"),
        ("just words", "not a recipe"),
        (RECIPE + "name: again\n", 'found duplicate key "name"'),
        ("[" * 20_000, "recipe.yaml is not valid YAML: it holds lists in lists too deep"),
        ("? [a]\n: 1", "'name' is missing"),
    ]:
        file.write_text(text)
        assert message in refusal(file)
    with pytest.raises(ValueError, match="'name' is missing"):
        parse_recipe({})


def test_a_text_file_is_not_quoted_whole(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("a word " * 100)
    message = refusal(tmp_path / "letter.txt")
    assert "is not a recipe: it holds 'a word" in message
    assert message.count("a word") < 10
    for override in (f"train.{'s' * 10_000}=1", f"train.steps={'s' * 10_000}", "s" * 10_000):
        with pytest.raises(ValueError, match="sss") as raised:
            load_recipe("tiny", [override])
        assert len(str(raised.value)) < 2000  # an unknown key is followed by those that are known
