"""Reads recipes, strict YAML files with the settings of model, data and training.

A kind of data is a class here, listed in `AnyData`, and a file in `diff_lab.data` that makes its batches.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_lab.data import (
    ArithmeticBatches,
    Batches,
    Corpus,
    HubDataset,
    ManyShotBatches,
    MaskedTextBatches,
    RecallBatches,
    RetrievalBatches,
    Tell,
    TextBatches,
    TextFiles,
    byte_tokenizer,
    prepare,
    trained_bpe,
    with_mask_token,
)
from diff_lab.data.recall_task import PAIR
from diff_lab.train.distributed import on_rank0
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.utils.suggestions import nearest, quoted

# Of whole numbers that tensors and generators of random numbers take.
LARGEST_INTEGER = (1 << 63) - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _yaml() -> Any:
    """Make the reader and writer of YAML 1.2, in which 2e-3 is a number and `no` is text."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.allow_unicode, yaml.sort_base_mapping_type_on_output = True, False
    return yaml


def read_yaml(text: str) -> Any:
    """Parse one YAML document.

    Raises ValueError if the text is not YAML, gives a key twice, or holds what Python cannot: lists in lists too deep.
    """
    try:
        return _yaml().load(text)
    except RecursionError:
        raise ValueError("it holds lists in lists too deep") from None
    except DuplicateKeyError as error:  # whose own text explains how to allow it
        raise ValueError(str(error.problem)) from None
    except (YAMLError, TypeError) as error:
        raise ValueError(str(error)) from None


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no conversions ("3" is not 3), no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Data:
    """Batches, and the tokenizer that made them (None for data that never was text)."""

    batches: Batches
    tokenizer: PreTrainedTokenizerFast | None = None


class TextData(Section):
    """Language modelling of real text; see `diff_lab.data.text_batches.TextBatches`.

    The text is in `paths` or a `dataset`, or it is the source of Python's standard library. docs/training.md explains
    each setting.
    """

    is_causal: ClassVar[bool] = True  # whether the model predicts the next token; else it is an encoder

    kind: Literal["text"] = "text"
    paths: Annotated[list[str], BeforeValidator(lambda path: [path] if isinstance(path, str) else path)] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    vocab_size: Annotated[int, Field(gt=257, le=LARGEST_INTEGER)] | None = None
    length: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)]
    batch_size: BatchSize
    isolate_documents: bool = True
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    validation_tokens: Count | None = 100_000
    cache: str | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> "TextData":
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError('vocab_size is given with tokenizer "bpe", and only then')
        if self.paths is not None and self.dataset is not None:
            raise ValueError("the text is either in paths or in a dataset, not in both")
        return self

    def describe(self) -> str:
        """Describe the data in a few words, for plans and model cards."""
        if self.dataset is not None:
            return f"the data set {self.dataset}"
        if self.paths is None:
            return "the source of Python's standard library"
        # Names alone: the folders that they lay in are in the recipe.
        return ", ".join(PurePath(path).name or path for path in self.paths)

    def vocabulary(self) -> int:
        """Return the size of the vocabulary; raises ValueError if the settings do not tell it."""
        if self.tokenizer == "bytes":
            return len(byte_tokenizer())
        if self.vocab_size is None:
            raise ValueError(f"a plan loads no tokenizer: give the tokens of {self.tokenizer!r} as model.vocab_size.")
        return self.vocab_size

    def build(self, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, tell: Tell | None = None) -> Data:
        """Find or make the data, with the seed of the training batches; see `diff_lab.train.run_setup.build_data`."""
        text: TextFiles | HubDataset = TextFiles(self.paths, self.text_field)
        if self.dataset is not None:
            text = HubDataset(self.dataset, self.dataset_config, self.dataset_split, self.text_field)
        corpus = replace(text, known=on_rank0(text.fingerprint))  # rank 0 looks whether it has changed
        tokenizer = tokenizer or self._tokenizer(corpus)
        return Data(self._batches(corpus, tokenizer, seed, tell), tokenizer)

    @property
    def _folder(self) -> Path | None:
        return None if self.cache is None else Path(os.path.expanduser(self.cache))

    def _tokenizer(self, corpus: Corpus | None = None) -> PreTrainedTokenizerFast:
        """Make the tokenizer, or load it from a folder or the Hub. A "bpe" is trained on the corpus."""
        if self.tokenizer == "bytes":
            return byte_tokenizer()
        if self.vocab_size is not None and corpus is not None:
            return trained_bpe(corpus, self.validation_fraction, self.vocab_size, self._folder)
        try:
            return AutoTokenizer.from_pretrained(os.path.expanduser(self.tokenizer))
        except Exception as error:  # of a damaged file: tokenizers raises nothing more specific
            raise ValueError(
                f'data.tokenizer is "bytes", "bpe", or the folder or name of a tokenizer, and {self.tokenizer!r} '
                f"cannot be loaded: {' '.join(str(error).split())}"
            ) from None

    def _batches(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int, tell: Tell | None) -> Batches:
        return TextBatches(
            prepare(corpus, tokenizer, self._folder, tell),
            tokenizer,
            seed=seed,
            isolated=self.isolate_documents,
            **self.model_dump(include={"length", "batch_size", "validation_fraction", "validation_tokens"}),
        )


class NeedleData(TextData):
    """Text with needle documents among it, which version 0.2.0 made: the recipes of such models are only read."""

    kind: Literal["needles"] = "needles"  # type: ignore[assignment]  # what tells it from text
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    needles: Count = 4
    queried: Count = 2
    digits: Annotated[int, Field(ge=1, le=18)] = 7
    turns: Count = 1
    validation_documents: Count = 128

    def describe(self) -> str:
        return f"{super().describe()}, with needle documents among it"

    def build(self, *_: Any, **__: Any) -> Data:
        raise ValueError(
            "Data of kind 'needles' is no longer made: train on data.kind=recall, and name text for the evaluation of "
            "a model of such a run (--text)."
        )


class MaskedTextData(TextData):
    """Text of which an encoder finds hidden tokens; see `diff_lab.data.masked_text.MaskedTextBatches`.

    `mask_fraction` is the share of each sequence that is to be found. A tokenizer without a mask token gets one.
    """

    is_causal: ClassVar[bool] = False

    kind: Literal["masked_text"] = "masked_text"  # type: ignore[assignment]  # what tells it from text
    mask_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3

    def describe(self) -> str:
        return f"{super().describe()}, with hidden tokens"

    def vocabulary(self) -> int:
        return super().vocabulary() + 1

    def _tokenizer(self, corpus: Corpus | None = None) -> PreTrainedTokenizerFast:
        return with_mask_token(super()._tokenizer(corpus))

    def _batches(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int, tell: Tell | None) -> Batches:
        text: Any = super()._batches(corpus, tokenizer, seed, tell)
        return MaskedTextBatches(text, tokenizer, mask_fraction=self.mask_fraction, seed=seed)


class GeneratedData(Section):
    """Data that a seeded generator makes as it is read; its settings are the arguments of the generator."""

    is_causal: ClassVar[bool] = True
    generator: ClassVar[Callable[..., Batches]]  # makes the batches; its `tokenizer`, if any, goes with the model
    summary: ClassVar[str]  # in a few words

    def describe(self) -> str:
        return self.summary

    def vocabulary(self) -> int:
        return self._generated().vocab_size

    def build(self, seed: int, *_: Any) -> Data:
        batches = self._generated(seed=seed)
        return Data(batches, getattr(batches, "tokenizer", None))

    def _generated(self, **arguments: int) -> Batches:
        return type(self).generator(**self.model_dump(exclude={"kind"}), **arguments)


class RetrievalData(GeneratedData):
    """Multi-needle retrieval among noise tokens; see `diff_lab.data.retrieval_task.RetrievalBatches`."""

    generator = RetrievalBatches
    summary = "multi-needle retrieval from a seeded generator"

    kind: Literal["retrieval"] = "retrieval"
    num_pairs: Count = 4
    length: Count = 128
    num_queries: Count | None = None
    repeats: bool = False
    vary: bool = False
    batch_size: BatchSize = 32
    num_keys: Count = 64
    num_values: Count = 64
    num_noise: Count = 128
    validation_sequences: Count = 1024


class RecallData(GeneratedData):
    """Recall among distractors of the same form; see `diff_lab.data.recall_task.RecallBatches`."""

    generator = RecallBatches
    summary = "associative recall among distractors, from a seeded generator"

    kind: Literal["recall"] = "recall"
    pairs: Count = 32
    questions: Count = 16
    tokens: Count = 64
    batch_size: BatchSize = 32
    validation_sequences: Count = 256

    @property
    def length(self) -> int:
        """Tokens of a sequence, at most."""
        return PAIR * (self.pairs + self.questions)


class ManyShotData(GeneratedData):
    """Words of classes shown with labels; see `diff_lab.data.many_shot_task.ManyShotBatches`."""

    generator = ManyShotBatches
    summary = "many-shot classification from a seeded generator"

    kind: Literal["many_shot"] = "many_shot"
    shots: Count = 48
    classes: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)] = 6
    labels: Count = 32
    words: Count = 36
    item_length: Count = 2
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.1
    vary: bool = False
    batch_size: BatchSize = 32
    validation_sequences: Count = 512

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.shots * (self.item_length + 1)


class ArithmeticData(GeneratedData):
    """Sums worked out step by step, as text; see `diff_lab.data.arithmetic_task.ArithmeticBatches`."""

    generator = ArithmeticBatches
    summary = "sums worked out step by step, from a seeded generator"

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Count = 4
    length: Count = 48
    batch_size: BatchSize = 64
    largest: Count = 9
    validation_problems: Count = 512


AnyData = TextData | MaskedTextData | RetrievalData | RecallData | ManyShotData | ArithmeticData
KINDS: dict[str, type[TextData | GeneratedData]] = {
    section.model_fields["kind"].default: section for section in get_args(AnyData)
}


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
    dual_lambda: bool = False
    head_dim: Count | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    lambda_init: Literal["schedule"] | float = "schedule"
    fixed_lambda: bool = False
    headwise_norm: bool | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    qk_clip: bool = False
    output_gate: bool = False
    exclusive_attention: bool = False
    layers_without_rotary: list[Annotated[int, Field(ge=0)]] | None = None
    attention_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    vocab_size: Count | None = None
    max_position_embeddings: Count | None = None
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-5
    initializer_range: Positive = 0.02
    residual_initializer_range: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    tie_word_embeddings: bool = False
    init_from: Annotated[str, Field(min_length=1)] | None = None

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
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
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
    inspect_every: Count | None = 100  # of earlier runs, which measured layers; nothing reads it
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    timeout_minutes: Annotated[float, Field(gt=0, le=10080)] = 30.0
    trackers: list[Literal["wandb", "trackio"]] = []

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
    if isinstance(model := settings.get("model"), dict) and "start_from" in model:
        model.setdefault("init_from", model.pop("start_from"))  # the key of older recipes
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
    key, _, value = override.partition("=")
    if not key or not value.strip():
        raise ValueError(
            f"{quoted(override)} is not an override; write section.key=value, such as train.steps=100 (null: none)."
        )
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
