"""The recipes of the paper's sizes: built without memory, as large as the paper calls them, trained as it says."""

import pytest

from diff_lab.train import build_config, load_recipe
from diff_lab.train.plan import meta_model
from diff_lab.train.recipe import TextData
from diff_lab.train.step import learning_rate

# Billions of parameters by the paper's names, to their last digit; layers, width, differential heads, d, FFN, length.
SERIES = {
    "paper-830m": (0.83, 24, 1536, 8, 96, 4096, 2048),
    "paper-1.4b": (1.4, 24, 2048, 8, 128, 5440, 2048),
    "paper-2.8b": (2.8, 32, 2560, 10, 128, 6784, 2048),
    "paper-6.8b": (6.8, 32, 4096, 16, 128, 10880, 2048),
    "paper-13.1b": (13.1, 40, 5120, 20, 128, 13632, 2048),
}
THREE = {"paper-3b": (3.48, 28, 3072, 12, 128, 8192, 4096), "paper-3b-64k": (3.48, 28, 3072, 12, 128, 8192, 65536)}


def parameters(name: str, *overrides: str) -> int:
    """Of the recipe's model, built on the meta device."""
    model = meta_model(build_config(load_recipe(name, overrides), vocab_size=100_277))
    assert all(parameter.is_meta for parameter in model.parameters()), "a parameter takes memory"
    # The rotary frequencies are real: no checkpoint holds them.
    assert sum(buffer.numel() for buffer in model.buffers() if not buffer.is_meta) <= 1 << 10
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [*SERIES, *THREE])
def test_twins_have_the_papers_size(name: str) -> None:
    billions, layers, hidden, heads, d, inner, length = {**SERIES, **THREE}[name]
    recipe = load_recipe(name)
    model = recipe.model
    assert (model.num_hidden_layers, model.hidden_size, model.heads) == (layers, hidden, 2 * heads)
    assert (model.head_dim, model.intermediate_size, recipe.data.length) == (d, inner, length)
    diff, softmax = parameters(name), parameters(name, "model.attention_type=softmax")
    assert diff - softmax == layers * (4 * d + 2 * d)  # λ and the headwise norm's weight
    digits = len(str(billions).partition(".")[2])
    assert round(diff / 1e9, digits) == round(softmax / 1e9, digits) == billions


@pytest.mark.parametrize("name", SERIES)
def test_untied_embeddings_would_not_fit_the_names(name: str) -> None:
    billions = SERIES[name][0]
    digits = len(str(billions).partition(".")[2])
    assert round(parameters(name, "model.tie_word_embeddings=false") / 1e9, digits) != billions
    assert 0 <= load_recipe(name).model.hidden_size * 8 / 3 - load_recipe(name).model.intermediate_size < 64


@pytest.mark.parametrize("name", SERIES)
def test_the_series_is_trained_as_in_section_3_2(name: str) -> None:
    recipe = load_recipe(name)
    train = recipe.train
    assert recipe.data.batch_size * recipe.data.length == 1 << 18  # 0.25M tokens
    assert (train.steps, train.warmup_steps, train.schedule) == (40_000, 375, "linear")
    assert (train.betas, train.weight_decay, train.optimizer) == ([0.9, 0.98], 0.05, "adamw")
    assert train.learning_rate == (7.5e-5 if name in ("paper-6.8b", "paper-13.1b") else 1.5e-4)


def test_the_3b_model_is_trained_as_in_section_3_1() -> None:
    recipe = load_recipe("paper-3b")
    train = recipe.train
    tokens = recipe.data.batch_size * recipe.data.length
    assert tokens == 4 << 20
    assert 350e9 <= train.steps * tokens < 350e9 + tokens
    assert (train.warmup_steps, train.schedule, train.betas, train.weight_decay) == (1000, "linear", [0.9, 0.95], 0.1)
    assert learning_rate(1000, train) == 3.2e-4
    assert learning_rate(train.steps, train) == pytest.approx(1.28e-5)


def test_the_longer_contexts_are_trained_as_in_section_3_3() -> None:
    recipe, before = load_recipe("paper-3b-64k"), load_recipe("paper-3b")
    tokens = recipe.data.batch_size * recipe.data.length
    assert tokens == before.data.batch_size * before.data.length
    assert 1.5e9 <= recipe.train.steps * tokens < 1.5e9 + tokens
    assert recipe.train.learning_rate == 8e-5
    assert recipe.model.rope_theta == 640_000
    assert recipe.model.init_from == "runs/paper-3b/model"
    changed = {"rope_theta", "init_from"}
    assert recipe.model.model_dump(exclude=changed) == before.model.model_dump(exclude=changed)


@pytest.mark.parametrize("name", [*SERIES, *THREE])
def test_the_vocabulary_is_padded_and_no_smaller_than_the_tokenizer(name: str) -> None:
    recipe = load_recipe(name)
    assert isinstance(recipe.data, TextData)
    assert build_config(recipe, vocab_size=100_277).vocab_size == 100_288
    with pytest.raises(ValueError, match=r"model\.vocab_size=100288 has no room for the data's 128000 tokens"):
        build_config(recipe, vocab_size=128_000)
