"""What docs/training.md says of keys and files is true, and its code runs."""

import json
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from diff_lab.data import byte_tokenizer
from diff_lab.train import load_recipe, shipped_recipes, train
from diff_lab.train.recipe import KINDS, ModelRecipe, Recipe, TrainRecipe, parse_recipe, read_yaml
from diff_lab.train.run_setup import check_init_from
from diff_transformer.cli.app import app as library

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
TABLES = PAGE.split("## Every key")[1]
# (key, default, the rest of the row)
ROWS = re.findall(r"^\| `([\w.]+)` \| (?!default )([^|]+) \|([^\n]*)\|$", TABLES, flags=re.MULTILINE)
SECTIONS: dict[str, list[type[BaseModel]]] = {"model": [ModelRecipe], "data": [*KINDS.values()], "train": [TrainRecipe]}

pytestmark = pytest.mark.usefixtures("accelerate_afresh")


def keys() -> list[tuple[str, FieldInfo]]:
    """Every key of a recipe with its field; those of all kinds of data one after the other."""
    fields = [("name", Recipe.model_fields["name"])]
    for section, models in SECTIONS.items():
        for model in models:
            fields += [(f"{section}.{name}", field) for name, field in model.model_fields.items()]
    return fields


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


RECIPE, FURTHER = blocks("yaml")
(CODE,) = blocks("python")


def test_every_key_is_there_and_no_other() -> None:
    assert set(Recipe.model_fields) == {"name", *SECTIONS}
    assert [key for key, _, _ in ROWS] == [key for key, _ in keys()]


def test_defaults_and_choices() -> None:
    for (key, default, text), (name, field) in zip(ROWS, keys(), strict=True):
        assert key == name
        if field.is_required() or key == "data.kind":  # which decides what the other keys of data are
            assert default == "needed", key
            continue
        documented = read_yaml(default)
        assert documented == field.default, key
        assert type(documented) is type(field.default), key
        choices = get_args(field.annotation)
        if len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
            assert set(choices) <= set(re.findall(r"`(\w+)`", text)), key


def test_keys_in_the_text_exist() -> None:
    known = {key for key, _ in keys()}
    named = set(re.findall(r"`((?:model|data|train)\.\w+)[`=]", PAGE))
    assert len(named) > 40
    assert named <= known


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the files that the page speaks of, to work in."""
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "further.yaml").write_text(FURTHER, encoding="utf-8")
    (tmp_path / "my-text").mkdir()
    lines = [json.dumps({"text": f"document {number}: to be, or not to be\n" * 40}) for number in range(60)]
    (tmp_path / "my-text" / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_and_the_code_run(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model.hidden_size": 32, "model.intermediate_size": 32, "model.head_dim": 8, "model.num_hidden_layers": 1}
    sizes |= {"data.vocab_size": 300, "data.length": 32, "data.batch_size": 2}
    tiny = ", ".join(f'"{key}={value}"' for key, value in sizes.items())
    smaller = CODE.replace('["train.steps=2"', f'[{tiny}, "train.steps=2"')
    assert smaller != CODE
    exec(compile(smaller, "docs/training.md", "exec"), {"__name__": "page"})
    loss, folder = capsys.readouterr().out.split()
    assert float(loss) < 8
    assert Path(folder) == Path("runs/short/model")
    # What is in the folder of a run, the page explains.
    table = PAGE.split("## The run folder")[1].split("\n## ")[0]
    explained = set(re.findall(r"^\| `([\w.-]+)[/`]", table, flags=re.MULTILINE))
    assert {path.name for path in Path("runs/short").iterdir()} == explained
    (line, *_) = Path("runs/short/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    table = PAGE.split("## Watching")[1].split("\n## ")[0]
    assert set(json.loads(line)) <= set(re.findall(r"`([\w/]+)`", table))


@pytest.mark.all
def test_a_converted_llama_is_trained_on(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second recipe, made small, starts from the Llama that its keys describe; without one of them it would not."""
    model = load_recipe(elsewhere / "further.yaml").model
    sizes = {"hidden_size": 36, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"vocab_size": 300, "max_position_embeddings": 64}
    names = set(read_yaml(FURTHER)["model"]) - {"init_from", "attention_type", "rope_theta"}
    settings = {name: sizes.get(name, getattr(model, name)) for name in names}
    rotary = {"rope_type": "default", "rope_theta": model.rope_theta}
    LlamaForCausalLM(LlamaConfig(**settings, rope_parameters=rotary)).save_pretrained("llama")
    byte_tokenizer().save_pretrained("llama")
    convert, *words = shlex.split(re.findall(r"after: diff-transformer (.*)", FURTHER)[0])
    assert convert == "convert"
    assert CliRunner().invoke(library, [convert, *words]).exit_code == 0

    smaller = [f"model.{name}={value}" for name, value in sizes.items()]
    smaller += ["data.length=16", "data.batch_size=2", "train.steps=1", "train.warmup_steps=0"]
    recipe = load_recipe(elsewhere / "further.yaml", smaller)
    run = train(recipe, "runs/further")
    written = json.loads((run.model_folder / "config.json").read_text(encoding="utf-8"))
    before = json.loads((elsewhere / "llama-v2" / "config.json").read_text(encoding="utf-8"))
    assert {name: (before[name], written[name]) for name in before if before[name] != written[name]} == {
        "bos_token_id": (1, 256),  # an end of text begins and ends the training's documents
        "eos_token_id": (2, 256),
    }
    # A key that may be left out, and is not what it would be without.
    for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "head_dim"):
        settings = recipe.model_dump(mode="json")
        del settings["model"][name]
        with pytest.raises(ValueError, match=rf"the recipe needs model\.{name}="):
            check_init_from(parse_recipe(settings))


def test_shipped_recipes_are_named() -> None:
    for name in shipped_recipes():
        paper = re.fullmatch(r"paper-[\d.]+[mb]", name)
        assert paper or f"`{name}`" in PAGE.partition("Shipped recipes")[2][:300], name
