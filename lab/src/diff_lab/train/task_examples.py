"""Writes examples.json beside a run's recipe: texts of its task, with which `explore` opens its model."""

import json
from pathlib import Path
from typing import Any

from diff_lab.data import NeedleBatches, NeedleDocument, RetrievalBatches
from diff_lab.data.batches import GeneratedBatches
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.train.data_kinds import Data
from diff_lab.train.run_folder import EXAMPLES
from diff_transformer.storage.files import write_atomically

_MOST_SEQUENCES, _MOST_TOKENS = 512, 1 << 17  # of the retrieval task; so many tokens take half a megabyte
_DOCUMENTS = 16  # with needles in text
_RETRIEVAL_NOTE = (
    "This model learned one task. A key (k3) with its value (v5) right after it is a needle among noise (n0, n1, …). "
    'At the end "?" and a key ask for a value, and the model should write it. It learned nothing else, so its loss on '
    "all of the text is high."
)


def write_examples(folder: Path, data: Data) -> None:
    """Write the examples of a run's task into its folder, unless they are there; nothing for a run on text.

    The format is that of `diff_transformer.explorer.model_examples`.
    """
    path = folder / EXAMPLES
    if not path.exists() and (examples := _examples(data)) is not None:
        write_atomically(path, json.dumps(examples, ensure_ascii=False) + "\n")


def _examples(data: Data) -> dict[str, Any] | None:
    batches, tokenizer = data.batches, data.tokenizer
    if isinstance(batches, RetrievalBatches):
        return {
            "words": batches.words(),
            "note": _RETRIEVAL_NOTE,
            "floor": most_frequent(batches.num_pairs, batches.num_values),
            "examples": _questions(batches),
        }
    if isinstance(batches, NeedleBatches):
        documents = batches.validation.sample(_DOCUMENTS, seed=0)
        return {"examples": [_question(number, document, tokenizer) for number, document in enumerate(documents, 1)]}
    if isinstance(batches, GeneratedBatches):
        tokens = next(batches.validation_batches())["input_ids"][0].tolist()
        # The text of a model without a tokenizer is the numbers of its tokens.
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        return {"examples": [{"title": "From the task of the training", "text": text}]}
    return None


def _questions(task: RetrievalBatches) -> list[dict[str, Any]]:
    """Sequences up to their first query, since the answers to earlier queries are in view of a later one."""
    count = max(1, min(_MOST_SEQUENCES, _MOST_TOKENS // task.length))
    sample, words = task.sample(count, seed=0), task.words()
    questions = []
    queries, answers = sample.query_positions[:, 0].tolist(), sample.answer_spans[:, 0].tolist()
    for number, (query, begin) in enumerate(zip(queries, answers, strict=True), start=1):
        text = [words[token] for token in sample.input_ids[number - 1, : query + 1].tolist()]
        title = f"Needles {number}: what was the value of {text[-1]}?"
        questions.append({"title": title, "text": " ".join(text), "answer": _answer(query, begin, begin + 1)})
    return questions


def _question(number: int, document: NeedleDocument, tokenizer: Any) -> dict[str, Any]:
    """A document up to the answer's number. Where its text alone has other tokens, the answer is not marked."""
    query, (begin, end) = document.query_positions[0], document.answer_spans[0]
    tokens = list(document.tokens[: query + 1])
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    is_same = tokenizer(text)["input_ids"] == tokens
    answer = {"answer": _answer(query, begin, end)} if is_same else {}
    return {"title": f"Needles {number} in a text", "text": text, **answer}


def _answer(query: int, begin: int, end: int) -> dict[str, int]:
    """The position that predicts the answer, and the answer's tokens in the text, the end not included."""
    return {"query": query, "begin": begin, "end": end}
