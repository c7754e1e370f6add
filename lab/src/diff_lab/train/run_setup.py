"""Prepares a run: its folder, its data, a model with its first weights, drawn or loaded, and examples of the task."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_lab.data import RecallBatches, RetrievalBatches, Tell
from diff_lab.data.batches import GeneratedBatches
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.train.checkpoint import without_progress_bars
from diff_lab.train.distributed import materialized, plain_connection_errors
from diff_lab.train.recipe import Data, ModelRecipe, Recipe, build_config, differences, dump_recipe, load_recipe
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.utils.files import present_folders, read_json, unfinished_path, write_atomically
from diff_transformer.utils.manifest import require_unchanged_weights

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
MODEL = "model"
EXAMPLES = "examples.json"
LOCK = ".lock"
# What a run writes, of earlier versions too; the recipe is deleted last, as it marks the folder as ours.
_UNFINISHED = (".unfinished-start", f".unfinished-{MODEL}", f".replaced-{MODEL}")
_OURS = (*_UNFINISHED, METRICS, TENSORBOARD, "wandb", CHECKPOINTS, MODEL, "divergence.json", EXAMPLES, RECIPE)
_BEGUN = {unfinished_path(Path(RECIPE)).name, LOCK}  # all that a run leaves that was killed when it began
# Settings that no number of a run depends on, and where its text lies: the text itself is known by what it says.
WITHOUT_EFFECT = (
    "data.cache",
    "data.paths",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.timeout_minutes",
    "train.trackers",
)
# Settings that a resumed run may change: also what is done about bad steps, from here on.
_CHANGEABLE = (*WITHOUT_EFFECT, "train.max_loss_rise", "train.on_divergence")
_HEADING = "# A training run of diff-transformer, every setting spelled out.\n"

# "auto": where there is a run.
Resume = bool | Literal["auto"]

# Settings of a recipe that the model it starts from need not share: positions, and what no weight depends on.
_FREE_SETTINGS = {"init_from", "vocab_size", "max_position_embeddings", "rope_theta"}
_FREE_SETTINGS |= {"initializer_range", "residual_initializer_range", "attention_dropout", "fixed_lambda"}
# And settings that no recipe has.
_SHARED_SETTINGS = [name for name in ModelRecipe.model_fields if name not in _FREE_SETTINGS]
_SHARED_SETTINGS += ["lambda_init_offset", "hidden_act", "sliding_window", "layer_types", "norm_eps_in_attention"]
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_run_folder(folder: Path, recipe: Recipe, *, resume: Resume, overwrite: bool) -> bool:
    """Check that a run of `recipe` may have `folder` and can start from the model it names. Changes nothing.

    Returns whether a run in the folder is resumed rather than begun. Raises ValueError, FileNotFoundError or
    FileExistsError, whose message names the way out.
    """
    if resume and overwrite:
        raise ValueError("A run is either resumed or overwritten, not both.")
    is_run = is_run_folder(folder)
    if resume and resume != "auto" and not is_run:
        raise FileNotFoundError(f"There is no run to resume in {str(folder)!r}.")
    if resume and is_run:
        changed = differences(load_recipe(folder / RECIPE), recipe)
        changed = [text for text in changed if text.partition(" ")[0] not in _CHANGEABLE]
        if changed:
            raise ValueError(
                f"The run in {str(folder)!r} was started with another recipe; (then, now) differ in: "
                f"{', '.join(changed)}; choose another --output (in Python output_dir), which may begin "
                "with this run's weights (model.init_from), or replace it with --overwrite (overwrite=True)."
            )
        if (folder / MODEL).is_dir() and not present_folders(folder / CHECKPOINTS, "*"):
            raise FileExistsError(
                f"The run in {str(folder)!r} is finished and has no checkpoints any more to resume from: its model "
                f"is in {str(folder / MODEL)!r}, and --overwrite (overwrite=True) trains it anew."
            )
        return True
    if is_run and not overwrite:
        raise FileExistsError(
            f"The output folder {str(folder)!r} already holds a run; "
            "choose another --output (in Python output_dir), resume it with --resume (resume=True), or replace it with "
            "--overwrite (overwrite=True)."
        )
    if not is_run and folder.exists() and not (folder.is_dir() and {p.name for p in folder.iterdir()} <= _BEGUN):
        raise FileExistsError(f"{str(folder)!r} exists and is not a run of ours, so nothing is written there.")
    start = check_init_from(recipe)
    if is_run and start is not None and start.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"model.init_from {str(start)!r} lies in the run that --overwrite (overwrite=True) would replace, and "
            "would be deleted with it; choose another --output (in Python output_dir)."
        )
    return False


def begin_run_folder(folder: Path, recipe: Recipe) -> None:
    """Prepare `folder`, which `check_run_folder` has allowed, for a new run of `recipe`.

    Overwriting deletes the files of a run and nothing else, and only if a run has written `recipe.yaml`.
    """
    if is_run_folder(folder):
        for path in (folder / name for name in _OURS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_recipe(folder, recipe)


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe that marks a folder as a run: complete or not at all."""
    write_atomically(folder / RECIPE, _HEADING + dump_recipe(recipe))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process from training in `folder` until the block, or this process, ends.

    Raises ValueError if another one trains there now. Folders that are made for the lock and stay empty are removed.
    """
    created = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process trains in {str(folder)!r} now: wait for it, or end it.") from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        for path in created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def is_run_folder(folder: Path) -> bool:
    """Return whether a training run has written this folder."""
    recipe = folder / RECIPE
    return recipe.is_file() and recipe.read_text(encoding="utf-8-sig", errors="replace").startswith(_HEADING)


def build_data(recipe: Recipe, tokenizer: PreTrainedTokenizerFast | None = None, tell: Tell | None = None) -> Data:
    """Find or make a recipe's data. Called on every rank of a run; rank 0 looks whether text has changed.

    Args:
        tokenizer: a trained model's own, for text; made as the recipe says unless given.
        tell: is told how many documents and tokens are prepared so far.

    Raises:
        FileNotFoundError, ValueError: as the corpus, `prepare` and the batches of the data's kind.
        ConnectionError: another rank has ended meanwhile.
    """
    with plain_connection_errors(recipe.train.timeout_minutes):
        return recipe.data.build(recipe.train.seed, tokenizer, tell)


def build_model(recipe: Recipe, data: Data, *, init_from: bool = True, without_weights: bool = False) -> LanguageModel:
    """Build a recipe's model in float32 with its first weights, for the vocabulary of the recipe's data.

    Args:
        init_from: whether to load the weights that the recipe names in `init_from`. Not if a checkpoint's are loaded
            afterwards: a run resumes without the model it was started from.
        without_weights: leave weights that would be drawn to a later :func:`draw_weights`: the model is on the meta
            device, so that no process holds all of one that is to be sharded.

    Raises:
        FileNotFoundError, ValueError: `init_from` holds no such model; or the vocabulary is larger than the recipe's.
    """
    config = build_config(recipe, data.batches.vocab_size, data.tokenizer)
    if init_from and (folder := check_init_from(recipe, config)):
        model = _load_initial_weights(folder, config, data.tokenizer)
    else:
        with torch.device("meta") if without_weights else nullcontext():
            model = language_model_class(config)(config)
        if recipe.model.fixed_lambda:
            for name, parameter in model.named_parameters():
                if any(f".{module}." in name for module in config.spec.lambda_modules):
                    parameter.requires_grad_(False)
        if not without_weights:
            draw_weights(model, recipe.train.seed)
    if data.tokenizer is not None and config.is_causal:
        model.generation_config.pad_token_id = data.tokenizer.pad_token_id
    return model


def draw_weights(model: LanguageModel, seed: int, modules: Iterable[tuple[str, torch.nn.Module]] | None = None) -> None:
    """Draw the first weights of each module from a stream of its own, named by the seed and the module.

    So modules that two models have in common start with identical numbers, although one of them has modules that the
    other lacks. If weights are sharded, every rank draws all of a module and keeps its part, module by module.
    `modules` are those of another engine's view of the model, by their names in it.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules() if modules is None else modules:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            with materialized(module):
                model._init_weights(module)  # transformers' hook: the model's own rule for each kind of module
                for parameter in module.parameters(recurse=False):
                    if not parameter.requires_grad:  # λ stays at λ_init
                        torch.nn.init.zeros_(parameter)


def _load_initial_weights(
    folder: Path, config: DiffTransformerConfig, tokenizer: PreTrainedTokenizerFast | None
) -> LanguageModel:
    """Load a model in float32 with the weights in a folder."""
    saved_tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None and saved_tokenizer is not None and saved_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"model.init_from {str(folder)!r} has a tokenizer of its own, with other tokens than the recipe's: "
            f"data.tokenizer={folder} takes it."
        )
    require_unchanged_weights(folder)
    try:
        with without_progress_bars():
            model, report = language_model_class(config).from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"model.init_from {str(folder)!r}: the weights cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise ValueError(f"model.init_from {str(folder)!r} does not hold the model's weights; wrong is {wrong[0]!r}.")
    return model.train()


def check_init_from(recipe: Recipe, config: DiffTransformerConfig | None = None) -> Path | None:
    """Raise an error if a recipe's model cannot start from its `init_from`, with the setting to change, or the reason.

    A vocabulary that the recipe does not have is known with `config`, once the data are read. Reads no weights, and
    returns the folder that the recipe names, if it names one.
    """
    if recipe.model.init_from is None:
        return None
    if recipe.model.fixed_lambda:
        raise ValueError(
            "model.fixed_lambda does not go with model.init_from: λ would stay at λ_init, and loaded weights have "
            "their own."
        )
    folder = Path(os.path.expanduser(recipe.model.init_from))
    names = [*_SHARED_SETTINGS, "vocab_size"] if config or recipe.model.vocab_size else _SHARED_SETTINGS
    config = config or build_config(recipe, vocab_size=1)
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise FileNotFoundError(
            f"model.init_from {str(folder)!r} holds no model: it must be a folder with config.json and "
            "model.safetensors, such as RUN/model or a checkpoint of a run."
        )
    kind = read_json(folder / "config.json").get("model_type")
    if kind != DiffTransformerConfig.model_type:
        raise ValueError(
            f"model.init_from {str(folder)!r} holds a model of type {kind!r}, which `diff-transformer convert` may "
            "make one of ours."
        )
    saved = DiffTransformerConfig.from_pretrained(folder)
    pairs = {"rope_type": [(each.rope_parameters or {}).get("rope_type", "default") for each in (saved, config)]}
    for name in names:
        # Left out, it is as the attention type has it.
        attribute = "has_headwise_norm" if name == "headwise_norm" else name
        pairs[name] = [getattr(each, attribute, None) for each in (saved, config)]
    needed = []
    for name, (there, here) in pairs.items():
        if there != here:
            # As a recipe and an override have it.
            there, here = (value if isinstance(value, str) else json.dumps(value) for value in (there, here))
            needed.append(f"model.{name}={there} (it has {here})")
    if needed:
        raise ValueError(
            f"model.init_from {str(folder)!r} is another model than the recipe's; to start from it the recipe needs "
            f"{', '.join(needed)}. A model with settings that no recipe has is trained by transformers' Trainer."
        )
    return folder


# Of examples.json: texts of a run's task, with which `explore` opens its model.
_MOST_SEQUENCES, _MOST_TOKENS = 512, 1 << 17  # of questions; so many tokens take half a megabyte
_NOTE = (
    "This model was trained on one task. A key (k3) has its value (v5) right after it; the other pairs, and tokens n0, "
    'n1, … if there are any, are the noise. At the end a key, after a "?" if the task has one, asks for its value. The '
    "model learned nothing else, so its loss on all of the text is high."
)


def write_examples(folder: Path, data: Data) -> None:
    """Write the examples of a run's task into its folder, unless they are there; nothing for a run on text.

    The format is that of `diff_transformer.cli.explored_checkpoints`.
    """
    path = folder / EXAMPLES
    if not path.exists() and (examples := _examples(data)) is not None:
        write_atomically(path, json.dumps(examples, ensure_ascii=False) + "\n")


def _examples(data: Data) -> dict[str, Any] | None:
    batches, tokenizer = data.batches, data.tokenizer
    if isinstance(batches, RetrievalBatches | RecallBatches):
        words = batches.words()
        # Cut after the first query, since the answers to earlier queries are in view of a later one.
        sample = batches.sample(max(1, min(_MOST_SEQUENCES, _MOST_TOKENS // batches.length)), seed=0)
        firsts = sample.query_positions[:, 0].tolist(), sample.answer_spans[:, 0].tolist()
        examples = []
        for number, (tokens, query, begin) in enumerate(zip(sample.input_ids, *firsts, strict=True), start=1):
            seen = [words[token] for token in tokens[: query + 1].tolist()]
            title = f"Question {number}: what was the value of {seen[-1]}?"
            answer = {"query": query, "begin": begin, "end": begin + 1}
            examples.append({"title": title, "text": " ".join(seen), "answer": answer})
        if isinstance(batches, RecallBatches):
            floor = most_frequent(batches.pairs, batches.tokens)
        else:
            floor = most_frequent(batches.num_pairs, batches.num_values)
        return {"words": words, "note": _NOTE, "floor": floor, "examples": examples}
    if isinstance(batches, GeneratedBatches):
        tokens = next(batches.validation_batches())["input_ids"][0].tolist()
        # The text of a model without a tokenizer is the numbers of its tokens.
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        return {"examples": [{"title": "From the task of the training", "text": text}]}
    return None
