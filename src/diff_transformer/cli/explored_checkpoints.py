"""Loads checkpoints for the explorer: the models, what they read, and the texts that the page opens with."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from diff_transformer import shipped_models
from diff_transformer.cli import console
from diff_transformer.cli.checkpoints import find_checkpoint, find_recipe, load_model, load_tokenizer, shown_folder
from diff_transformer.cli.eval_command import batches_of
from diff_transformer.data import NeedleTask, RetrievalBatches
from diff_transformer.explorer import (
    Answer,
    Example,
    ExploredModel,
    Explorer,
    LambdaSettings,
    Side,
    Task,
    TokenizerVocabulary,
    Vocabulary,
    WordVocabulary,
)
from diff_transformer.explorer.explored_model import subtracts
from diff_transformer.explorer.lambda_settings import LEARNED
from diff_transformer.explorer.recorded_page import recorded_page
from diff_transformer.lab.measure.retrieval import FIRST_QUERY, retrieval_answers, retrieval_baselines
from diff_transformer.storage.files import write_atomically
from diff_transformer.train.data_kinds import GeneratedData

FIRST_TEXT = (
    "The old house stood at the end of the lane, behind a row of black poplars. Nobody had lived in the old house for "
    "twenty years, and nobody in the village remembered who had planted the row of black"
)
_TRIED_TOKENS = 4096  # of needles, of which the first that the model finds with its λ alone is shown first
_SEQUENCES = 512  # on which the strip's accuracy is measured
_RETRIEVAL_NOTE = (
    "This model learned one task. A key (k3) with its value (v5) right after it is a needle among noise (n0, n1, …). "
    'At the end "?" and a key ask for a value, and the model should write it. It learned nothing else, so its loss on '
    "all of the text is high."
)
_NUMBERS_NOTE = "The model has no tokenizer: a text is the numbers of its tokens."


def shipped_pairs() -> dict[str, tuple[Path, Path]]:
    """The package's models that belong together, by their family: FAMILY-diff beside FAMILY-softmax.

    Raises:
        ValueError: there are none.
    """
    names = shipped_models.pretrained_names()
    families = [name.removesuffix("-diff") for name in names if name.endswith("-diff")]
    pairs = {
        family: (Path(f"{family}-diff"), Path(f"{family}-softmax"))
        for family in families
        if f"{family}-softmax" in names
    }
    if not pairs:
        raise ValueError(
            "No CHECKPOINT is named, and this copy of the package was built without models: train some, for example by "
            "`diff-transformer demo`, and name the folder of one."
        )
    return pairs


def write_recorded_page(
    checkpoint: Path,
    compare: Path | None,
    output: Path,
    *,
    text: str | Example | None = None,
    device: str | None = None,
) -> None:
    """Write the page of two models as one file, over a file that is there. Raises ValueError as `build_explorer`."""
    explorer = build_explorer(checkpoint, compare, text, device)
    console.say("Recording the maps of all heads, and what the model predicts with other λ …")
    write_atomically(output, recorded_page(explorer))


def build_explorer(checkpoint: Path, compare: Path | None, text: str | Example | None, device: str | None) -> Explorer:
    """Load the models and what they read. A text that is given comes before the explorer's own.

    Raises:
        ValueError: the checkpoint is not differential, or a text that it cannot read.
    """
    folders = [find_checkpoint(path, ours=False) for path in (checkpoint, compare) if path is not None]
    if not subtracts(AutoConfig.from_pretrained(folders[0], local_files_only=True)):
        raise ValueError(
            f"{str(checkpoint)!r} has ordinary attention, which subtracts nothing; name a differential model as "
            "CHECKPOINT, and this one as --compare."
        )
    sides = [_load_side(folder, device) for folder in folders]
    left = sides[0]
    examples = []
    if text is not None:
        given = text if isinstance(text, Example) else Example("Your text", text)
        left.model.check_tokens(left.vocabulary.encode(given.text))
        examples.append(given)
    draw = _needles(folders[0], left)
    examples.append(_first_needles(left, draw) if draw else _first_text(folders[0], left))
    return Explorer(left, sides[1] if len(sides) > 1 else None, examples, draw, _task(folders[0], left))


def _load_side(folder: Path, device: str | None) -> Side:
    shown = shown_folder(folder)
    console.say(f"Loading {shown} …")
    model = ExploredModel(load_model(folder, device), shown.parent.name if shown.name == "model" else shown.name)
    return Side(model, _vocabulary(folder, model.vocab_size))


def _vocabulary(folder: Path, size: int) -> Vocabulary:
    if (folder / "tokenizer.json").is_file():
        return TokenizerVocabulary(load_tokenizer(folder))
    recipe = find_recipe(folder)
    if recipe is not None and recipe.data.kind == "retrieval":
        batches = batches_of(folder)
        assert isinstance(batches, RetrievalBatches)
        return WordVocabulary(batches.words(), _RETRIEVAL_NOTE)
    return WordVocabulary([str(token) for token in range(size)], _NUMBERS_NOTE)


def _needles(folder: Path, side: Side) -> Callable[[int], Example] | None:
    """What draws needles by a seed, where the model was trained to find them and the data are where they were.

    None, too, where they lie among more tokens than the explorer takes.
    """
    recipe = find_recipe(folder)
    if recipe is None or recipe.data.kind not in ("retrieval", "needles"):
        return None
    if recipe.data.length > side.model.most_tokens:
        return None
    try:
        batches: Any = batches_of(folder)
    except (OSError, ValueError):
        return None
    if isinstance(batches, RetrievalBatches):
        return partial(_needles_among_tokens, batches, side.vocabulary)
    return partial(_needles_in_text, batches.validation, side.vocabulary)


def _task(folder: Path, side: Side) -> Task | None:
    """The retrieval task, where the model was trained on it: what it answers to the first query of each sequence, as
    the answers to queries before a later one are in view."""
    recipe = find_recipe(folder)
    if recipe is None or recipe.data.kind != "retrieval":
        return None
    batches = batches_of(folder)
    assert isinstance(batches, RetrievalBatches)
    sample = batches.sample(_SEQUENCES, seed=0)
    queries = sample.query_positions[:, :1]
    first = replace(
        sample,
        input_ids=sample.input_ids[:, : int(queries.max()) + 1],
        query_positions=queries,
        answer_spans=sample.answer_spans[:, :1],
    )
    (floor,) = [one.floor for one in retrieval_baselines(recipe) if one.name == FIRST_QUERY]
    return Task(lambda: retrieval_answers(side.model.model, first).double().mean().item(), _SEQUENCES, floor)


def _needles_among_tokens(task: RetrievalBatches, vocabulary: Vocabulary, seed: int) -> Example:
    sample = task.sample(1, seed)
    query, begin = int(sample.query_positions[0, 0]), int(sample.answer_spans[0, 0])
    text = vocabulary.decode(sample.input_ids[0, : query + 1].tolist())
    title = f"Needles {seed + 1}: what was the value of {text.split()[-1]}?"
    return Example(title, text, Answer(query, begin, begin + 1))


def _needles_in_text(task: NeedleTask, vocabulary: Vocabulary, seed: int) -> Example:
    """A document up to the answer's number. Where its text alone has other tokens, the answer is not marked."""
    document = task.sample(1, seed)[0]
    query, (begin, end) = document.query_positions[0], document.answer_spans[0]
    tokens = list(document.tokens[: query + 1])
    text = vocabulary.decode(tokens)
    is_same = vocabulary.encode(text) == tokens
    return Example(f"Needles {seed + 1} in a text", text, Answer(query, begin, end) if is_same else None)


def _first_needles(side: Side, draw: Callable[[int], Example]) -> Example:
    """The first that the model finds, and does not with λ = 0; or else the first that it finds; or the first of all."""
    found, seed, read = [], 0, 0
    while read < _TRIED_TOKENS:
        example = draw(seed)
        tokens = side.vocabulary.encode(example.text)
        if example.answer is not None:
            right = [
                int(side.model.trace(tokens, settings).next_log_probabilities.argmax()) == tokens[example.answer.begin]
                for settings in (LEARNED, LambdaSettings(factor=0.0))
            ]
            if right == [True, False]:
                return example
            if right[0]:
                found.append(example)
        seed, read = seed + 1, read + len(tokens)
    return found[0] if found else draw(0)


def _first_text(folder: Path, side: Side) -> Example:
    """Of a generated task its first validation sequence; else some text, or tokens, cut to leave room to write on."""
    recipe, vocabulary = find_recipe(folder), side.vocabulary
    most = max(1, 3 * side.model.most_tokens // 4)
    if recipe is not None and isinstance(recipe.data, GeneratedData):
        first = next(batches_of(folder).validation_batches())["input_ids"][0]
        return Example("From the task of the training", vocabulary.decode(first[:most].tolist()))
    if isinstance(vocabulary, WordVocabulary):
        return Example("The first tokens", " ".join(vocabulary.words[: min(16, most)]))
    words = FIRST_TEXT.split()
    while len(words) > 1 and len(vocabulary.encode(" ".join(words))) > most:
        del words[-1]
    return Example("A house at the end of the lane", " ".join(words))
