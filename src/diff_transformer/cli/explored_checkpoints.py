"""Loads checkpoints for the explorer: the models, their vocabularies, and the page's first texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig

from diff_transformer import shipped_models
from diff_transformer.cli import console
from diff_transformer.cli.checkpoints import files_of, find_checkpoint, load_model, load_tokenizer, shown_folder
from diff_transformer.explorer import (
    Answer,
    Example,
    ExploredModel,
    Explorer,
    LambdaSettings,
    Side,
    TokenizerVocabulary,
    WordVocabulary,
)
from diff_transformer.explorer.explored_model import LEARNED
from diff_transformer.explorer.page import recorded_page
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.utils.files import read_json, write_atomically

EXAMPLES = "examples.json"
FIRST_TEXT = (
    "The old house stood at the end of the lane, behind a row of black poplars. Nobody had lived in the old house for "
    "twenty years, and nobody in the village remembered who had planted the row of black"
)
_TRIED = 16  # questions, of which the first that the model answers with its λ alone is shown first
_NUMBERS_NOTE = "The model has no tokenizer: a text is the numbers of its tokens."


class ModelExamples(NamedTuple):
    """The content of an examples.json, which docs/explorer.md describes."""

    examples: tuple[Example, ...] = ()
    words: tuple[str, ...] = ()
    note: str = ""
    floor: float | None = None


def read_examples(folder: Path) -> ModelExamples:
    """Read the examples.json of a model, if it has one. Raises ValueError if that is not JSON, or holds else."""
    file = next(iter(files_of(folder, EXAMPLES)), None)
    if file is None:
        return ModelExamples()
    content = read_json(file)
    try:
        floor = content.get("floor")
        examples = [
            Example(str(one["title"]), str(one["text"]), Answer(**one["answer"]) if one.get("answer") else None)
            for one in content["examples"]
        ]
        words, note = tuple(map(str, content.get("words", ()))), str(content.get("note", ""))
        return ModelExamples(tuple(examples), words, note, None if floor is None else float(floor))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(file)!r} holds no examples as `diff-transformer explore` reads them: {error}") from None


def shipped_pairs() -> dict[str, tuple[Path, Path]]:
    """Return the package's models that belong together, by their family: FAMILY-diff beside FAMILY-softmax.

    Raises ValueError if there are none.
    """
    names = shipped_models.pretrained_names()
    pairs = {
        family: (Path(f"{family}-diff"), Path(f"{family}-softmax"))
        for family in (name.removesuffix("-diff") for name in names)
        if {f"{family}-diff", f"{family}-softmax"} <= {*names}
    }
    if not pairs:
        raise ValueError(
            "No CHECKPOINT is named, and this copy of the package was built without models: train some, for example by "
            "`diff-lab demo`, and name the folder of one."
        )
    return pairs


def write_recorded_page(
    checkpoint: Path, compare: Path | None, output: Path, *, text: str | Example | None, device: str | None = None
) -> None:
    """Write the page of two models as one file, over a file that is there. Raises ValueError as `build_explorer`."""
    explorer = build_explorer(checkpoint, compare, text, device)
    console.say("Recording the maps of all heads, and the predictions with other λ …")
    write_atomically(output, recorded_page(explorer))


def build_explorer(checkpoint: Path, compare: Path | None, text: str | Example | None, device: str | None) -> Explorer:
    """Load the models and their vocabularies. A given text comes before the explorer's own.

    Raises ValueError for a checkpoint that is not differential, or a text that it cannot read.
    """
    folders = [find_checkpoint(path, ours=False) for path in (checkpoint, compare) if path is not None]
    config = AutoConfig.from_pretrained(folders[0], local_files_only=True)
    is_ours = isinstance(config, DiffTransformerConfig)
    if not (config.spec.differential if is_ours else config.model_type == "diffllama"):
        raise ValueError(
            f"{str(checkpoint)!r} has ordinary attention, which subtracts nothing; name a differential model as "
            "CHECKPOINT, and this one as --compare."
        )
    known = read_examples(folders[0])
    sides = [load_side(folder, device) for folder in folders]
    left, right = sides[0], sides[1] if len(sides) > 1 else None
    examples = []
    if text is not None:
        given = text if isinstance(text, Example) else Example("Your text", text)
        left.model.check_tokens(left.vocabulary.encode(given.text))
        examples.append(given)
    answered = [one for one in known.examples if one.answer is not None]
    questions = [one for one in answered if len(left.vocabulary.encode(one.text)) <= left.model.most_tokens]
    examples.append(_first_question(left, questions) if questions else _first_text(left, known.examples))
    return Explorer(left, right, examples, questions, known.floor if questions else None)


def load_side(folder: Path, device: str | None) -> Side:
    """Load the model in a folder that `find_checkpoint` found, with its tokenizer, or the words of its examples."""
    examples, shown = read_examples(folder), shown_folder(folder)
    console.say(f"Loading {shown} …")
    model = ExploredModel(load_model(folder, device), shown.parent.name if shown.name == "model" else shown.name)
    if (tokenizer := load_tokenizer(folder, required=False)) is not None:
        return Side(model, TokenizerVocabulary(tokenizer))
    if examples.words:
        return Side(model, WordVocabulary(examples.words, examples.note))
    return Side(model, WordVocabulary([str(token) for token in range(model.vocab_size)], _NUMBERS_NOTE))


def _first_question(side: Side, questions: Sequence[Example]) -> Example:
    """Return the first of a few that the model answers with its λ and not with 0; else the first."""
    for example in questions[:_TRIED]:
        tokens = side.vocabulary.encode(example.text)
        with_lambda, without = (
            int(side.model.trace(tokens, settings).next_log_probabilities.argmax())
            for settings in (LEARNED, LambdaSettings(factor=0.0))
        )
        if example.answer and with_lambda == tokens[example.answer.begin] != without:
            return example
    return questions[0]


def _first_text(side: Side, examples: Sequence[Example]) -> Example:
    """Return an example of the model's task; else some text, or tokens; cut where λ = 0 changes most what follows."""
    title, text = "A house at the end of the lane", FIRST_TEXT
    if examples:
        title, text = "From the task of the training", examples[0].text
    elif isinstance(side.vocabulary, WordVocabulary):
        title, text = "The first tokens", " ".join(side.vocabulary.words[:16])
    tokens, most = side.vocabulary.encode(text), max(1, 3 * side.model.most_tokens // 4)  # with room to write on
    text = text if len(tokens) <= most else side.vocabulary.decode(tokens[:most])
    cut = side.vocabulary.decode(tokens[: side.model.most_changed_length(tokens[:most])])
    # Decoded text may begin with that of a special token.
    return Example(title, cut if text.startswith(cut) else text)
