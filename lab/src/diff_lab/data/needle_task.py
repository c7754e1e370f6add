"""Makes documents with needles, and batches of them among text, so that a small model can learn the template."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import padded, require_positive
from diff_lab.data.text_batches import TextBatches
from diff_lab.data.tokenizers import plain_text_tokenizer

_NAMES = (
    "Accra Algiers Amman Ankara Athens Baghdad Baku Bangkok Beijing Beirut Belgrade Berlin Bern Bogota Boston Brussels "
    "Bucharest Budapest Cairo Caracas Chicago Dakar Delhi Denver Dhaka Doha Dublin Hanoi Harare Havana Helsinki "
    "Istanbul Jakarta Kabul Kampala Kyiv Lagos Lima Lisbon London Luanda Lusaka Madrid Manila Miami Milan Minsk Moscow "
    "Mumbai Nairobi Oslo Paris Prague Quito Riga Riyadh Rome Santiago Seattle Seoul Sofia Stockholm Sydney Taipei "
    "Tallinn Tbilisi Tehran Tokyo Toronto Tripoli Tunis Vienna Vilnius Warsaw Yerevan Zagreb Zurich"
)
CITIES = tuple(_NAMES.split())
# After the end of a sentence, with the quotation marks or brackets that close it, where white space follows.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")
_RARE = 200  # characters of a sentence, on average, that are too many to find one near every depth
_LINE_END = re.compile(r"(?<=\S)(?=\n)")
_LEAST_TEXT = 32  # tokens
# What a document is drawn for. (The numbers differ from those of `batches`: runs of today keep their documents.)
SAMPLE, TRAINING, VALIDATION = range(3)


def needle(city: str, number: str) -> str:
    """Return what is hidden in the haystack, and the answer."""
    return f"The special magic {city} number is: {number}"


def question(cities: Sequence[str]) -> str:
    """Return what is asked about one city or more."""
    if len(cities) == 1:
        return f"What is the special magic number for {cities[0]}?"
    return f"What are the special magic numbers for {', '.join(cities[:-1])}, and {cities[-1]}?"


@dataclass(frozen=True)
class NeedleDocument:
    """A haystack with needles, questions and answers. Positions count tokens from the document's first."""

    tokens: tuple[int, ...]  # of the whole document
    learned: tuple[bool, ...]  # for each token, whether it belongs to an answer
    prompt_length: int  # tokens before the last answer, which is what a model is to give
    context_length: int  # tokens before the first question
    numbers: tuple[str, ...]  # what the last question asks for, R numbers of digits
    answer_spans: tuple[tuple[int, int], ...]  # R spans (begin, end) of these numbers in the context
    needle_spans: tuple[tuple[int, int], ...]  # R spans of the needles that they stand in
    query_positions: tuple[int, ...]  # R positions in the last answer that each predict a number's first token


@dataclass(eq=False, repr=False)
class NeedleTask:
    """Documents of a haystack's text with needles on lines of their own, each after the end of a sentence.

        … text. ⏎ The special magic Oslo number is: 4821907 ⏎ text …
        What is the special magic number for Oslo?
        The special magic Oslo number is: 4821907

    Args:
        tokenizer: a fast tokenizer of transformers.
        haystack: the text, of which each document takes a part, drawn at random, that fills its length.
        length: tokens of a document at most; its text is cut to fit.
        needles: how many are hidden.
        queried: how many of them a question asks for, each on a line of the answer.
        digits: of a number; its first one is not 0.
        turns: questions with answers at the end of a document. Only the last counts in an evaluation; in training
            more of them teach more.
        vary: whether each document has its own number of needles, from 1 to `needles`, and of queried ones.

    Raises:
        ValueError: a number is out of range, or the haystack or the length is too short.
    """

    tokenizer: Any
    haystack: str
    _: KW_ONLY
    length: int
    needles: int = 4
    queried: int = 2
    digits: int = 7
    turns: int = 1
    vary: bool = False

    def __post_init__(self) -> None:
        require_positive(self)
        if not self.queried <= self.needles <= len(CITIES) or self.digits > 18:
            raise ValueError(
                f"needles must be at most {len(CITIES)}, queried at most as many, and digits at most 18, "
                f"got needles={self.needles}, queried={self.queried}, digits={self.digits}."
            )
        # A haystack that names a special token has its text.
        self._encoder = plain_text_tokenizer(self.tokenizer)
        widest = max(CITIES, key=lambda city: len(self._encode(city).ids))
        line = len(self._encode(f"\n{needle(widest, '9' * self.digits)}\n").ids)
        question_tokens = len(self._encode(f"\n{question([widest] * self.queried)}\n").ids)
        self._most = self.needles * (line + 2) + self.turns * (question_tokens + self.queried * line) + 1
        if self.length < self._most + _LEAST_TEXT:
            raise ValueError(
                f"length={self.length} has no room for a haystack of {_LEAST_TEXT} tokens: {self.needles} needles, "
                f"{self.turns} questions for {self.queried} and their answers may take {self._most}."
            )
        beginning = self.haystack[: 64 * self.length]
        tokens = len(self._encode(beginning).ids)
        if tokens < self.length:
            raise ValueError(f"The haystack has fewer tokens than one document of {self.length}: give more text.")

        # Of this text a quarter more than a document needs on average, so that most are tokenised once.
        self._characters = 1.25 * len(beginning) / tokens

    def sample(self, n: int, seed: int, depth: float | None = None) -> list[NeedleDocument]:
        """`n` documents; with a depth in 0 … 1, the first queried needle lies there and the others anywhere."""
        return [self.draw((seed, SAMPLE, number), depth) for number in range(n)]

    def batch(self, seed: int, purpose: int, numbers: range) -> dict[str, Tensor]:
        """Return the documents of these numbers as a batch, with labels on answers alone; see `padded`."""
        documents = (self.draw((seed, purpose, number)) for number in numbers)
        return padded(((document.tokens, document.learned) for document in documents), self.length)

    def draw(self, numbers: tuple[int, int, int], depth: float | None = None) -> NeedleDocument:
        """Return the document of a stream of random numbers. Raises ValueError for a depth outside 0 … 1."""
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depth must be between 0 and 1, got {depth}.")
        random = np.random.default_rng(numbers)
        count = int(random.integers(1, self.needles + 1)) if self.vary else self.needles
        cities = [CITIES[index] for index in random.permutation(len(CITIES))[:count]]
        smallest = 10 ** (self.digits - 1)
        values = list(map(str, random.integers(smallest, 10 * smallest, size=count)))
        lines = [needle(city, value) for city, value in zip(cities, values, strict=True)]
        turns = [self._targets(random, count) for _ in range(self.turns)]
        text = self._text(random, self.length - self._most)
        context, spans = _hide(random, text, lines, turns[-1][0], depth)

        encoded = self._encode(context)
        tokens, learned = list(encoded.ids), [False] * len(encoded.ids)
        for targets in turns:
            ask = self._encode(f"\n{question([cities[index] for index in targets])}\n").ids
            reply = self._encode("\n".join(lines[index] for index in targets))
            prompt_length = len(tokens) + len(ask)
            tokens += [*ask, *reply.ids]
            learned += [False] * len(ask) + [True] * len(reply.ids)
        if self.tokenizer.eos_token_id is not None:
            tokens.append(self.tokenizer.eos_token_id)
            learned.append(True)

        # A number stands at the end of its line. In the answer the token before its first one predicts it.
        queried = turns[-1]
        needle_spans = [spans[index] for index in queried]
        answer_ends = np.cumsum([len(lines[index]) + 1 for index in queried]) - 1
        firsts = [_span(reply.offsets, end - self.digits, end)[0] for end in answer_ends]
        return NeedleDocument(
            tokens=tuple(tokens),
            learned=tuple(learned),
            prompt_length=prompt_length,
            context_length=len(encoded.ids),
            numbers=tuple(values[index] for index in queried),
            answer_spans=tuple(_span(encoded.offsets, end - self.digits, end) for _, end in needle_spans),
            needle_spans=tuple(_span(encoded.offsets, begin, end) for begin, end in needle_spans),
            query_positions=tuple(prompt_length + first - 1 for first in firsts),
        )

    def _targets(self, random: np.random.Generator, count: int) -> list[int]:
        queried = min(count, self.queried)
        if self.vary:
            queried = int(random.integers(1, queried + 1))
        return random.permutation(count)[:queried].tolist()

    def _text(self, random: np.random.Generator, tokens: int) -> str:
        """At most so many tokens of the haystack, drawn at random, from the beginning of a word on."""
        size = int(self._characters * tokens)
        while True:
            start = int(random.integers(max(1, len(self.haystack) - size)))
            encoded = self._encode(self.haystack[start : start + size])
            if len(encoded.ids) >= tokens:
                break
            size = min(2 * size, len(self.haystack))
        text = self.haystack[start : start + encoded.offsets[tokens - 1][1]]
        begin = re.search(r"\s+", text[: len(text) // 4])
        return text[begin.end() if begin else 0 :].rstrip()

    def _encode(self, text: str) -> Any:
        return self._encoder.encode(text, add_special_tokens=False)


def _hide(
    random: np.random.Generator, text: str, lines: list[str], target: int, depth: float | None
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text with these lines in it, and the characters of each; `target` lies at `depth` if that is given."""
    positions = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    if len(positions) < len(lines) + len(text) // _RARE:  # source code has few sentences, but lines
        positions = [0, *(match.end() for match in _LINE_END.finditer(text)), len(text)]
    positions = sorted(set(positions))
    chosen = random.choice(positions, size=len(lines), replace=len(positions) < len(lines))
    if depth is not None:
        nearest = min(positions, key=lambda position: abs(position - depth * len(text)))
        # Another needle that lies there goes where this one would have.
        chosen = np.where(chosen == nearest, chosen[target], chosen)
        chosen[target] = nearest
    hidden, spans, last = "", [(0, 0)] * len(lines), 0
    for index in np.argsort(chosen, kind="stable"):
        position = int(chosen[index])
        hidden += text[last:position] + ("\n" if position else "")
        spans[index] = len(hidden), len(hidden) + len(lines[index])
        # A line of its own: what follows begins with white space or, at the beginning, is given a new line.
        follows = text[position : position + 1]
        hidden += lines[index] + ("" if follows in ("", "\n") else "\n")
        last = position
    return hidden + text[last:], spans


def _span(offsets: list[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """Return the tokens that have one of the characters begin … end − 1."""
    inside = [token for token, (first, last) in enumerate(offsets) if first < end and last > begin]
    return inside[0], inside[-1] + 1


@dataclass(eq=False, repr=False)
class NeedleBatches:
    """Sequences of text in which every token is learned, and of needle documents in which the answers are.

    Args:
        text: gives the text's sequences, as many as each batch has; None where all are needle documents.
        training: draws the needle documents to train on.
        validation: draws those to validate with, from a haystack that is not trained on.
        documents: needle documents in a batch.
        vocab_size: tokens of the tokenizer.
        seed: of the training documents; the validation documents do not depend on it.
        validation_documents: needle documents in `validation_batches`.

    Raises:
        ValueError: a number is below 1.
    """

    text: TextBatches | None
    training: NeedleTask
    validation: NeedleTask
    _: KW_ONLY
    documents: int
    vocab_size: int
    seed: int = 0
    validation_documents: int = 128

    def __post_init__(self) -> None:
        require_positive(self)
        self.source = hashlib.sha256(self.training.haystack.encode("utf-8", "surrogatepass")).hexdigest()

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """Return the text's batch of a step with the needle documents below it; see `Batches.train_batch`."""
        first = (step - 1) * self.documents
        batch = self.training.batch(self.seed, TRAINING, range(first, first + self.documents))
        if self.text is None:
            return batch
        above = self.text.train_batch(step)
        if "position_ids" in above:
            batch["position_ids"] = torch.arange(self.training.length).expand_as(batch["input_ids"])
        return {name: torch.cat((above[name], batch[name])) for name in batch}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """`validation_documents` fixed needle documents, without the text; the last batch may be smaller."""
        size = self.documents + (0 if self.text is None else self.text.batch_size)
        for start in range(0, self.validation_documents, size):
            stop = min(start + size, self.validation_documents)
            yield self.validation.batch(0, VALIDATION, range(start, stop))
