"""Reads recipes, strict YAML files with the settings of model, data and training."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from transformers import PreTrainedTokenizerFast

from diff_lab.train.data_kinds import KINDS, LARGEST_INTEGER, AnyData, Count, NeedleData, Section
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.utils.suggestions import nearest, quoted

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _yaml() -> Any:
    """Make the reader and writer of YAML 1.2, in which 2e-3 is a number and `no` is text."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.allow_unicode, yaml.sort_base_mapping_type_on_output = True, False
    return yaml


def read_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises ValueError if the text is not YAML, gives a key twice, or holds values that Python cannot: lists in lists too
    deep, a number of thousands of digits.
    """
    try:
        return _yaml().load(text)
    except RecursionError:
        raise ValueError("it holds lists in lists too deep") from None
    except DuplicateKeyError as error:  # whose own text explains how to allow it
        raise ValueError(str(error.problem)) from None
    except (YAMLError, TypeError) as error:
        raise ValueError(str(error)) from None


def _trainable(attention_type: str) -> str:
    """Accept the attention types that are trained from the start; a corrected one starts as a trained model."""
    allowed = [name for name, described in ATTENTION_TYPES.items() if not described.corrects_heads]
    if attention_type not in allowed:
        choices = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {choices}", {"choices": choices})
    return attention_type


class ModelRecipe(Section):
    """The model; the names are those of `DiffTransformerConfig`, and docs/training.md explains each.

    A DIFF Transformer and its baseline differ in `attention_type` alone. A setting left out is derived: the number of
    the Transformer's heads from `head_dim`, the positions from the length of the training sequences.
    """

    attention_type: Annotated[str, AfterValidator(_trainable)] = "diff"
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    num_noise_heads: Count | None = None
    token_lambda: bool = False
    head_dim: Count | None = None
    lambda_init: Literal["schedule"] | float = "schedule"
    fixed_lambda: bool = False
    headwise_norm: bool | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    vocab_size: Count | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-5
    initializer_range: Positive = 0.02
    residual_initializer_range: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    tie_word_embeddings: bool = False
    init_from: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, validation_alias=AliasChoices("init_from", "start_from")
    )

    @property
    def heads(self) -> int:
        """The Transformer's attention heads. Raises ValueError if the settings do not tell them."""
        if self.num_attention_heads is not None:
            return self.num_attention_heads
        if self.head_dim is None:
            raise ValueError("give head_dim or num_attention_heads.")
        if self.hidden_size % self.head_dim:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of head_dim={self.head_dim}, "
                "so num_attention_heads must be given."
            )
        return self.hidden_size // self.head_dim


class TrainRecipe(Section):
    """How to train; docs/training.md explains each setting. Counts are of optimizer steps."""

    steps: Count
    learning_rate: Positive
    schedule: Literal["linear", "cosine", "warmup_stable_decay", "constant"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] = 0
    decay_steps: Count | None = None
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.1
    optimizer: Literal["adamw", "muon"] = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    max_grad_norm: Positive | None = 1.0
    accumulation: Count = 1
    precision: Literal["no", "bf16", "fp16"] = "no"  # fp16 is that of earlier runs, and trains no more
    device: Literal["auto", "cpu"] = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    on_divergence: Literal["stop", "skip"] = "stop"
    max_loss_rise: Positive | None = 2.0
    seed: Annotated[int, Field(ge=0, le=LARGEST_INTEGER)] = 0
    log_every: Count = 10
    evaluate_every: Count | None = None
    inspect_every: Count | None = 100
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    timeout_minutes: Annotated[float, Field(gt=0, le=10080)] = 30.0

    @model_validator(mode="after")
    def _decay_belongs_to_its_schedule(self) -> "TrainRecipe":
        if (self.schedule == "warmup_stable_decay") != (self.decay_steps is not None):
            raise ValueError('decay_steps is given with schedule "warmup_stable_decay", and only then')
        return self


class Recipe(Section):
    """A training run."""

    name: Annotated[str, Field(min_length=1)]
    model: ModelRecipe
    data: Annotated[AnyData | NeedleData, Field(discriminator="kind")]
    train: TrainRecipe

    @model_validator(mode="after")
    def _parts_fit(self) -> "Recipe":
        if self.data.batch_size % self.train.accumulation:
            raise ValueError(
                f"train.accumulation={self.train.accumulation} does not divide data.batch_size={self.data.batch_size}"
            )
        positions = self.model.max_position_embeddings
        if positions is not None and positions < self.data.length:
            raise ValueError(
                f"model.max_position_embeddings={positions} is shorter than data.length={self.data.length}"
            )
        return self


def shipped_recipes() -> dict[str, Path]:
    """Find the recipes that come with the package, by name."""
    package = Path(__file__).resolve().parents[1]
    folders = (package / "recipes", package.parents[1] / "recipes")  # an installed wheel, a checkout
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe from a file, from its plain settings, or one that is shipped by its bare name ("tiny").

    `overrides` replace these settings, "train.steps=100"; values are YAML, and the last of one key counts. Raises
    FileNotFoundError, or ValueError if the file is not YAML, or a key or value is not allowed.
    """
    settings: Any
    if isinstance(recipe, Mapping):
        settings, source = deepcopy(dict(recipe)), f"the recipe {recipe.get('name')!r}"
    else:
        path, shipped = Path(recipe), shipped_recipes()
        if not path.is_file() and str(recipe) in shipped:
            path = shipped[str(recipe)]
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no recipe {str(recipe)!r}; shipped ones are {', '.join(map(repr, sorted(shipped)))}."
            )
        settings, source = _read_file(path), str(path)
        if not isinstance(settings, dict):
            raise ValueError(f"{path} is not a recipe: it holds {quoted(settings)}, not sections of settings.")
        if isinstance(model := settings.get("model"), dict) and "init_from" not in model and "start_from" in model:
            model["init_from"] = model.pop("start_from")  # the key of older recipes
    for override in overrides:
        _apply(settings, override)
    return parse_recipe(settings, source=source)


def is_recipe(path: Path) -> bool:
    """Return whether a YAML file has a recipe's sections, which other programs' files of the same name have not.

    Raises ValueError if the file is not YAML.
    """
    settings = _read_file(path)
    return isinstance(settings, dict) and {"model", "data", "train"} <= settings.keys()


def _read_file(path: Path) -> Any:
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def parse_recipe(settings: dict[str, Any], *, source: str = "the recipe") -> Recipe:
    """Check plain settings. Raises ValueError with one sentence about the first thing that is not allowed."""
    try:
        recipe = Recipe.model_validate(settings)
    except ValidationError as error:
        raise ValueError(_explain(error, source)) from None
    try:
        build_config(recipe, vocab_size=1)  # the sizes must fit each other; the vocabulary is known with the data
    except ValueError as error:
        raise ValueError(f"{source}: the model cannot be built: {error}") from None
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """Write a recipe as YAML with every default spelled out; `load_recipe` reads it back as it was."""
    yaml, stream = _yaml(), StringIO()
    yaml.default_flow_style = False
    yaml.dump(recipe.model_dump(), stream)
    return stream.getvalue()


def override_of(key: str, value: str | list[str]) -> str:
    """Write the override that gives a setting this value, text or a list of texts: in JSON, which YAML 1.2 includes."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def differences(first: Recipe, second: Recipe) -> list[str]:
    """Name the settings that two recipes do not share: "train.steps (100, 200)"."""
    flat: list[dict[str, Any]] = []
    for recipe in (first, second):
        sections = recipe.model_dump(exclude={"name"}).items()
        flat.append({f"{section}.{key}": value for section, settings in sections for key, value in settings.items()})
        flat[-1]["name"] = recipe.name
    pairs = {key: tuple(settings.get(key, "absent") for settings in flat) for key in flat[0] | flat[1]}
    return [f"{key} {values}" for key, values in pairs.items() if values[0] != values[1]]


def build_config(
    recipe: Recipe, vocab_size: int, tokenizer: PreTrainedTokenizerFast | None = None
) -> DiffTransformerConfig:
    """Make the configuration of a recipe's model, whose vocabulary is that of the data unless the recipe pads it.

    The end of text of a `tokenizer` becomes the model's, to start and to end with. Not to pad with: transformers leaves
    the embedding of a padding token untrained, and this one is met in training. Raises ValueError if the vocabulary
    is larger than the recipe's, or sizes do not fit each other.
    """
    model = recipe.model
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ValueError(f"model.vocab_size={model.vocab_size} has no room for the data's {vocab_size} tokens.")
    end = tokenizer.eos_token_id if tokenizer is not None else None
    derived = {
        "vocab_size": model.vocab_size or vocab_size,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.max_position_embeddings or recipe.data.length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "is_causal": recipe.data.is_causal,
    }
    settings = model.model_dump(exclude={"init_from", "rope_theta", "fixed_lambda"})
    return DiffTransformerConfig(**settings | derived, bos_token_id=end, eos_token_id=end)


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(
            f"{quoted(override)} is not an override; write section.key=value, for example train.steps=100."
        )
    key = "model.init_from" if key == "model.start_from" else key  # the key of older recipes
    *sections, last = key.split(".")
    inner = settings
    for section in sections:
        inner = inner.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"Cannot set {key!r}: {section!r} is a setting, not a section.")
    try:
        inner[last] = read_yaml(value)
    except ValueError:
        raise ValueError(f"The value of {quoted(override)} is not valid YAML.") from None


def _explain(error: ValidationError, source: str) -> str:
    """Write one sentence. Unknown keys first: a mistyped key often is the reason why another one is missing."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    # Pydantic puts the chosen kind of data between "data" and the key; a user never wrote it there.
    parts = [str(part) for part in problem["loc"]]
    kind = parts.pop(1) if parts[:1] == ["data"] and parts[1:2] and parts[1] in KINDS else None
    key, value = ".".join(parts), problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            return f"{source}: unknown key {quoted(key)}{_suggestion(key, kind)}"
        case "missing":
            return f"{source}: {key!r} is missing."
        case "union_tag_invalid" | "union_tag_not_found":
            kind = value.get("kind") if isinstance(value, dict) else None
            return f"{source}: 'data.kind' is one of {', '.join(map(repr, KINDS))}, got {quoted(kind)}."
        case "value_error":
            section = f" in {key!r}" if key else ""
            return f"{source}: {problem['ctx']['error']}{section}."
    if parts[:2] == ["model", "lambda_init"]:  # pydantic adds which of the two types it tried
        return f"{source}: 'model.lambda_init' is {quoted(value)}; allowed are 'schedule' or a number."
    return f"{source}: {key!r} is {quoted(value)}; {problem['msg'][0].lower()}{problem['msg'][1:]}."


def _suggestion(key: str, kind: str | None) -> str:
    """Write the end of a message about an unknown key; if the kind of data is not known, any may have been meant."""
    data = [KINDS[kind]] if kind in KINDS else list(KINDS.values())
    sections: dict[str, list[type[BaseModel]]] = {"model": [ModelRecipe], "data": [*data], "train": [TrainRecipe]}
    inner = [f"{name}.{field}" for name, each in sections.items() for section in each for field in section.model_fields]
    allowed = [*Recipe.model_fields, *inner]
    section = key.rpartition(".")[0]
    in_section = [each for each in allowed if each.rpartition(".")[0] == section]
    by_name = {each.rpartition(".")[2]: each for each in (*allowed, *in_section)}  # the section's own before others
    if near := nearest(key.rpartition(".")[2], by_name):
        return f"; did you mean {by_name[near]!r}?"
    return f"; allowed are {', '.join(map(repr, in_section or allowed))}."
