"""Measures how many needles hidden in a text are found, and the attention to them (Tables 2, 3, Figure 5)."""

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import comb
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches, TextBatches
from diff_lab.data.tokenizers import plain_text_tokenizer
from diff_lab.measure.answers import greedy_answers, share_record
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.retrieval import ATTENTION, attention_of_spans
from diff_lab.measure.standard import text_part
from diff_lab.record import Baseline, Result
from diff_lab.statistics import mean_interval

_NAMES = (
    "Accra Algiers Amman Ankara Athens Baghdad Baku Bangkok Beijing Beirut Belgrade Berlin Bern Bogota Boston Brussels "
    "Bucharest Budapest Cairo Caracas Chicago Dakar Delhi Denver Dhaka Doha Dublin Hanoi Harare Havana Helsinki "
    "Istanbul Jakarta Kabul Kampala Kyiv Lagos Lima Lisbon London Luanda Lusaka Madrid Manila Miami Milan Minsk Moscow "
    "Mumbai Nairobi Oslo Paris Prague Quito Riga Riyadh Rome Santiago Seattle Seoul Sofia Stockholm Sydney Taipei "
    "Tallinn Tbilisi Tehran Tokyo Toronto Tripoli Tunis Vienna Vilnius Warsaw Yerevan Zagreb Zurich"
)
CITIES = tuple(_NAMES.split())
DIGITS = 7  # of a number; its first one is not 0
# After the end of a sentence, with the quotation marks or brackets that close it, where white space follows.
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)")
_RARE = 200  # characters of a sentence, on average, that are too many to find one near every depth
_LINE_END = re.compile(r"(?<=\S)(?=\n)")
_LEAST_TEXT = 32  # tokens
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the first queried needle, as in the paper
ACCURACY, JOINT, BY_DEPTH = "needles/accuracy", "needles/joint_accuracy", "needles/accuracy_by_depth"
# Under a name of its own: both may be measured in one cell.
ATTENTION_ACCURACY = "needles/attention_task_accuracy"
ATTENTION_METHOD = "Student's t over sequences; mean over heads, layers and queries"


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
    """A haystack with needles, a question and its answer. Positions count tokens from the document's first."""

    tokens: tuple[int, ...]  # of the whole document
    prompt_length: int  # tokens before the answer, which is what a model is to give
    context_length: int  # tokens before the question
    numbers: tuple[str, ...]  # what the question asks for, R numbers of digits
    answer_spans: tuple[tuple[int, int], ...]  # R spans (begin, end) of these numbers in the context
    needle_spans: tuple[tuple[int, int], ...]  # R spans of the needles that they stand in
    query_positions: tuple[int, ...]  # R positions in the answer that each predict a number's first token


@dataclass(eq=False, repr=False)
class NeedleTask:
    """Documents of a haystack's text with needles on lines of their own, each after the end of a sentence.

        … text. ⏎ The special magic Oslo number is: 4821907 ⏎ text …
        What is the special magic number for Oslo?
        The special magic Oslo number is: 4821907

    Raises ValueError if there are fewer needles than are queried, or the haystack or the length is too short.
    """

    tokenizer: Any  # a fast one of transformers
    haystack: str  # the text, of which each document takes a part, drawn at random
    _: KW_ONLY
    length: int  # tokens of a document, at most
    needles: int = 4  # that are hidden
    queried: int = 2  # of them, each on a line of the answer

    def __post_init__(self) -> None:
        if not self.queried <= self.needles <= len(CITIES):
            raise ValueError(
                f"needles must be at most {len(CITIES)} and queried at most as many, "
                f"got needles={self.needles}, queried={self.queried}."
            )
        # A haystack that names a special token has its text.
        self._encoder = plain_text_tokenizer(self.tokenizer)
        widest = max(CITIES, key=lambda city: len(self._encode(city).ids))
        line = len(self._encode(f"\n{needle(widest, '9' * DIGITS)}\n").ids)
        question_tokens = len(self._encode(f"\n{question([widest] * self.queried)}\n").ids)
        self._most = self.needles * (line + 2) + question_tokens + self.queried * line + 1
        if self.length < self._most + _LEAST_TEXT:
            raise ValueError(
                f"length={self.length} has no room for a haystack of {_LEAST_TEXT} tokens: {self.needles} needles, "
                f"a question for {self.queried} and the answer may take {self._most}."
            )
        beginning = self.haystack[: 64 * self.length]
        tokens = len(self._encode(beginning).ids)
        if tokens < self.length:
            raise ValueError(f"The haystack has fewer tokens than one document of {self.length}: give more text.")
        # Of this text a quarter more than a document needs on average, so that most are tokenised once.
        self._characters = 1.25 * len(beginning) / tokens

    def sample(self, n: int, seed: int, depth: float | None = None) -> list[NeedleDocument]:
        """Draw `n` documents; with a depth in 0 … 1, the first queried needle lies there and the others anywhere."""
        return [self._draw(np.random.default_rng((seed, 0, number)), depth) for number in range(n)]

    def _draw(self, random: np.random.Generator, depth: float | None) -> NeedleDocument:
        cities = [CITIES[index] for index in random.permutation(len(CITIES))[: self.needles]]
        smallest = 10 ** (DIGITS - 1)
        values = list(map(str, random.integers(smallest, 10 * smallest, size=self.needles)))
        lines = [needle(city, value) for city, value in zip(cities, values, strict=True)]
        queried = random.permutation(self.needles)[: self.queried].tolist()
        text = self._text(random, self.length - self._most)
        context, spans = _hide(random, text, lines, queried[0], depth)

        encoded = self._encode(context)
        ask = self._encode(f"\n{question([cities[index] for index in queried])}\n").ids
        reply = self._encode("\n".join(lines[index] for index in queried))
        closing = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        prompt_length = len(encoded.ids) + len(ask)

        # A number stands at the end of its line. In the answer the token before its first one predicts it.
        needle_spans = [spans[index] for index in queried]
        answer_ends = np.cumsum([len(lines[index]) + 1 for index in queried]) - 1
        firsts = [_span(reply.offsets, end - DIGITS, end)[0] for end in answer_ends]
        return NeedleDocument(
            tokens=(*encoded.ids, *ask, *reply.ids, *closing),
            prompt_length=prompt_length,
            context_length=len(encoded.ids),
            numbers=tuple(values[index] for index in queried),
            answer_spans=tuple(_span(encoded.offsets, end - DIGITS, end) for _, end in needle_spans),
            needle_spans=tuple(_span(encoded.offsets, begin, end) for begin, end in needle_spans),
            query_positions=tuple(prompt_length + first - 1 for first in firsts),
        )

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


def needle_answers(
    model: Any, tokenizer: Any, documents: Sequence[NeedleDocument], batch_size: int = 16
) -> list[list[bool]]:
    """Return which numbers stand in the greedy answers: for each document, one for each queried city."""
    longest = max(len(document.tokens) for document in documents)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"A document has {longest} tokens and the model {model.config.max_position_embeddings} positions; "
            "ask for shorter ones."
        )
    # As many as the right answer has and a few more: no room to list what was not asked for.
    new_tokens = max(len(document.tokens) - document.prompt_length for document in documents) + 4
    prompts = [document.tokens[: document.prompt_length] for document in documents]
    answers = greedy_answers(model, tokenizer, prompts, new_tokens, batch_size)
    texts = (tokenizer.decode(answer) for answer in answers)
    return [[number in text for number in document.numbers] for document, text in zip(documents, texts, strict=True)]


def document_attention(model: Any, documents: Sequence[NeedleDocument]) -> Tensor:
    """Measure attention of the tokens that predict the first token of each number, after the right answer before it."""
    length = max(len(document.tokens) for document in documents)
    return attention_of_spans(
        model,
        torch.tensor([[*one.tokens, *[one.tokens[-1]] * (length - len(one.tokens))] for one in documents]),
        torch.tensor([document.query_positions for document in documents]),
        torch.tensor([document.answer_spans for document in documents]),
        torch.tensor([document.needle_spans for document in documents]),
        torch.tensor([document.context_length for document in documents]),
        batch_size=1,
    )


def haystack(batches: TextBatches, tokenizer: Any) -> str:
    """Return the text of validation data, put together from its blocks, which overlap by a token."""
    rows = [row for batch in batches.validation_batches() for row in batch["input_ids"].tolist()]
    tokens = [token for number, row in enumerate(rows) for token in (row if number == 0 else row[1:])]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


class NeedleMeasurement(Measurement):
    """Which needles are hidden, and how many are asked for."""

    needs = "text"

    needles: Count = Field(default=4, description="cities with a number each in a document")
    queried: Count = Field(default=2, description="cities that are asked for")
    length: Count | None = Field(default=None, description="tokens of a document; as in training unless given")
    samples: Count = Field(default=50, description="documents at each depth")
    batch_size: Count = Field(default=16, description="documents at a time")

    @property
    def coordinates(self) -> Coordinates:
        """Return those of the accuracy."""
        return Coordinates(needles=self.needles, queries=self.queried)

    def check(self, batches: Batches | None, tokenizer: Any) -> NeedleTask:
        """Return the task that the options and the text make."""
        text = text_part(batches)
        length, hidden = self.length or text.length, self.needles
        return NeedleTask(tokenizer, haystack(text, tokenizer), length=length, needles=hidden, queried=self.queried)

    def documents(self, measured: EvalInput) -> dict[float, list[NeedleDocument]]:
        """Draw the documents at each depth."""
        task = self.check(measured.batches, measured.tokenizer)
        return {depth: task.sample(self.samples, measured.seed, depth) for depth in DEPTHS}

    def answers(self, measured: EvalInput, documents: Sequence[NeedleDocument]) -> Tensor:
        """Return which of the cities the model finds: (n, queried) boolean."""
        return torch.tensor(needle_answers(measured.model, measured.tokenizer, documents, self.batch_size))


class Needles(NeedleMeasurement):
    """Numbers of cities hidden in a text and found again, by generation, at five depths (Table 2, Figure 5)."""

    def run(self, measured: EvalInput) -> list[Result]:
        answers = {depth: self.answers(measured, some) for depth, some in self.documents(measured).items()}
        right = torch.cat(list(answers.values()))
        return [
            share_record(measured, ACCURACY, right, self.coordinates),
            share_record(measured, JOINT, right.all(1, keepdim=True), self.coordinates),
            *(
                share_record(measured, BY_DEPTH, at_depth, Coordinates(self.coordinates, depth=depth))
                for depth, at_depth in answers.items()
            ),
        ]

    def baselines(self, recipe: Any) -> list[Baseline]:
        """Return chance and floor; a blind answer lists as many of the numbers as are asked for, at random."""
        guess = 1 / (9 * 10 ** (DIGITS - 1))
        each = {"steps": recipe.train.steps, "chance": guess, "floor": self.queried / self.needles}
        joint = {**each, "chance": guess**self.queried, "floor": 1 / comb(self.needles, self.queried)}
        follows: dict[str, Any] = {**each, "accuracy": ACCURACY, "accuracy_coordinates": self.coordinates}
        depths = [Coordinates(self.coordinates, depth=depth) for depth in DEPTHS]
        return [
            Baseline(name=ACCURACY, coordinates=self.coordinates, **each),
            Baseline(name=JOINT, coordinates=self.coordinates, **joint),
            *(Baseline(name=BY_DEPTH, coordinates=depth, **follows) for depth in depths),
        ]


class NeedleAttention(NeedleMeasurement):
    """The attention to such a number and attention noise, by both definitions (Table 3)."""

    any_model = False

    needles: Count = Field(default=8, description="cities with a number each in a document")
    queried: Count = Field(default=1, description="cities that are asked for")
    samples: Count = Field(default=10, description="documents at each depth")

    def run(self, measured: EvalInput) -> list[Result]:
        documents = self.documents(measured)
        right = torch.cat([self.answers(measured, some) for some in documents.values()])
        records = [share_record(measured, ATTENTION_ACCURACY, right, self.coordinates)]
        for depth, some in documents.items():
            masses = document_attention(measured.model, some).double().mean(1).unbind(-1)
            for (name, better), values in zip(ATTENTION.items(), masses, strict=True):
                fields: dict[str, Any] = {"n": len(values), "better": better, "method": ATTENTION_METHOD}
                fields |= {"interval": mean_interval(values.tolist()), "coordinates": Coordinates(depth=depth)}
                records.append(measured.record(f"needles/{name}", values.mean().item(), **fields))
        return records
