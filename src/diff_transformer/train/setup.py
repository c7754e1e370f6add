"""From a recipe to the things that are trained: data and a model with its first weights."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_transformer.data import (
    ArithmeticBatches,
    Batches,
    Corpus,
    Fingerprinted,
    HubDataset,
    ManyShotBatches,
    NeedleBatches,
    NeedleTask,
    RetrievalBatches,
    Tell,
    TextBatches,
    TextFiles,
    byte_tokenizer,
    prepare,
    trained_bpe,
    training_text,
    validation_text,
)
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.train.recipe import (
    ArithmeticData,
    ManyShotData,
    NeedleData,
    Recipe,
    RetrievalData,
    TextData,
    build_config,
)
from diff_transformer.train.sharding import whole
from diff_transformer.train.standstill import plain_connection_errors
from diff_transformer.train.start import load_start
from diff_transformer.train.together import told_by_first


@dataclass(frozen=True)
class Data:
    """Batches, and the tokenizer that made them (None for data that never was text)."""

    batches: Batches
    tokenizer: PreTrainedTokenizerFast | None = None


def build_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast | None = None,
    tell: Tell | None = None,
    workers: int | None = None,
) -> Data:
    """Find or make a recipe's data. Called on every process of a run: the first one looks whether text has changed.

    Args:
        recipe: the recipe.
        tokenizer: a trained model's own, for text; made as the recipe says unless given.
        tell: is told how many documents and tokens are prepared so far.
        workers: processes that tokenise, see :func:`diff_transformer.data.prepare`.

    Raises:
        FileNotFoundError, ValueError: as the corpus, `prepare` and the batches of the data's kind.
        ConnectionError: another process of the run has ended meanwhile.
    """
    data, seed = recipe.data, recipe.train.seed
    if isinstance(data, RetrievalData):
        return Data(RetrievalBatches(**data.model_dump(exclude={"kind"}), seed=seed))
    if isinstance(data, ManyShotData):
        return Data(ManyShotBatches(**data.model_dump(exclude={"kind"}), seed=seed))
    if isinstance(data, ArithmeticData):
        problems = ArithmeticBatches(**data.model_dump(exclude={"kind"}), seed=seed)
        return Data(problems, problems.tokenizer)
    folder = None if data.cache is None else Path(data.cache)
    found = _corpus(data, folder)
    with plain_connection_errors(recipe.train.timeout_minutes):
        corpus = Fingerprinted(found, told_by_first(found.fingerprint))
    tokenizer = tokenizer or _tokenizer(data, corpus, folder)
    sequences = data.batch_size - (data.documents if isinstance(data, NeedleData) else 0)
    batches = None
    if sequences:
        batches = TextBatches(
            prepare(corpus, tokenizer, folder, tell, workers),
            tokenizer,
            length=data.length,
            batch_size=sequences,
            seed=seed,
            validation_fraction=data.validation_fraction,
            validation_tokens=data.validation_tokens,
            isolated=data.isolate_documents,
        )
    if isinstance(data, NeedleData):
        return Data(_needles(data, corpus, tokenizer, batches, seed), tokenizer)
    assert batches is not None  # all sequences are text, and there is one or more
    return Data(batches, tokenizer)


def _needles(
    data: NeedleData, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, text: TextBatches | None, seed: int
) -> NeedleBatches:
    training, validation = (
        NeedleTask(
            tokenizer,
            "".join(read(corpus, data.validation_fraction)),
            length=data.length,
            needles=data.needles,
            queried=data.queried,
            digits=data.digits,
            turns=turns,
            vary=vary,
        )
        for read, turns, vary in ((training_text, data.turns, True), (validation_text, 1, False))
    )
    return NeedleBatches(
        text,
        training,
        validation,
        documents=data.documents,
        vocab_size=len(tokenizer),
        seed=seed,
        validation_documents=data.validation_documents,
    )


def _corpus(data: TextData, folder: Path | None) -> Corpus:
    if data.dataset is not None:
        return HubDataset(data.dataset, data.dataset_config, data.dataset_split, data.text_field)
    return TextFiles(data.paths, data.text_field, folder)


def _tokenizer(data: TextData, corpus: Corpus, folder: Path | None) -> PreTrainedTokenizerFast:
    if data.tokenizer == "bytes":
        return byte_tokenizer()
    if data.vocab_size is not None:
        return trained_bpe(corpus, data.validation_fraction, data.vocab_size, folder)
    try:
        return AutoTokenizer.from_pretrained(data.tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(
            f'data.tokenizer is "bytes", "bpe", or the folder or name of a tokenizer, and {data.tokenizer!r} cannot be '
            f"loaded: {' '.join(str(error).split())}"
        ) from None


def build_model(
    recipe: Recipe, data: Data, *, start: bool = True, without_weights: bool = False
) -> DiffTransformerForCausalLM:
    """A recipe's model in float32 with its first weights.

    Args:
        recipe: the recipe.
        data: its data, whose vocabulary the model gets.
        start: whether to load the weights that the recipe names in `start_from`. Not where a checkpoint's are loaded
            afterwards: a run goes on without what it was started from.
        without_weights: leave weights that would be drawn to a later :func:`draw_weights`: the model is on the meta
            device, so that one which is to be shared out is nowhere whole.

    Raises:
        FileNotFoundError, ValueError: `start_from` holds no such model; or the vocabulary is larger than the recipe's.
    """
    config = build_config(recipe, data.batches.vocab_size, data.tokenizer)
    if start and recipe.model.start_from is not None:
        model = load_start(recipe, config, data.tokenizer)
    else:
        with torch.device("meta") if without_weights else nullcontext():
            model = DiffTransformerForCausalLM(config)
        if not without_weights:
            draw_weights(model, recipe.train.seed)
    if data.tokenizer is not None:
        model.generation_config.pad_token_id = data.tokenizer.pad_token_id
    return model


def draw_weights(model: DiffTransformerForCausalLM, seed: int) -> None:
    """First weights, of each module from a stream of its own, named by the seed and the module.

    So whatever twins have in common starts with identical numbers, although one of them has modules that the other
    lacks. Where weights are sharded, every process draws a module's whole and keeps its part, module by module.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            with whole(module):
                model._init_weights(module)  # transformers' hook: the model's own rule for each kind of module
