"""Answers the page's questions about one or two models (docs/explorer.md), or refuses them with a ValueError."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from diff_transformer.explorer.explored_model import (
    LEARNED,
    ExploredModel,
    LambdaSettings,
    Vocabulary,
    replaced_lambdas,
)
from diff_transformer.explorer.trace import Answer, Trace, answer_shares, encode_maps, head_numbers
from diff_transformer.utils.suggestions import quoted

SHOWN_TOKENS = 10  # of a distribution
STRIP_FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of λ, at which the strip is measured
# Attributes of a model that the page reads.
_DESCRIBED: tuple[str, ...] = ("name", "label", "layers", "heads", "kv_heads", "noise_heads")
_DESCRIBED += ("subtracts", "lambda_per_token", "most_tokens", "grid")
_KEPT_BYTES = 1 << 29  # of traces
_KEPT_TRACES = 64
_BATCH = 64  # of the task's questions are answered at once
_LARGEST_TEMPERATURE = 10.0
_LARGEST_PICTURE = 128


@dataclass(frozen=True)
class Side:
    """A model and its vocabulary."""

    model: ExploredModel
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Example:
    """A text to begin with, and the place of the answer to its question, if it asks one; or an image.

    Attributes:
        picture: address of the image whose title the text is (a data URL).
    """

    title: str
    text: str
    answer: Answer | None = None
    picture: str | None = None


class Explorer:
    """One or two models side by side: a differential one on the left, any causal language model on the right.

    All methods may be called from several threads; the models run one at a time.

    Args:
        left: the model whose λ the reader moves.
        right: the model beside it, or None.
        examples: texts that the page offers. It opens with the first, at the head whose λ = 0 changes most.
        questions: of the task that the model on the left was trained for, all with an answer; the page draws from them.
        floor: the accuracy of a guess among a text's answers. With it the strip shows the accuracy at the questions.
    """

    def __init__(
        self,
        left: Side,
        right: Side | None = None,
        examples: Sequence[Example] = (),
        questions: Sequence[Example] = (),
        floor: float | None = None,
    ) -> None:
        self.sides = {"left": left} | ({} if right is None else {"right": right})
        self.examples, self.task_questions, self.floor = tuple(examples), tuple(questions), floor
        self._accuracies: dict[float, float] = {}
        self._opening = None
        if examples and left.model.subtracts:
            self._opening = left.model.most_changed_head(left.vocabulary.encode(examples[0].text))
        self._running = threading.RLock()
        self._kept: dict[object, Trace] = {}

    @property
    def questions(self) -> dict[str, Callable[[Any], Any]]:
        """The method for each kind of question, by the page's name for it."""
        return {
            "run": self.run,
            "map": self.head_map,
            "next": self.next_token,
            "example": self.example,
            "strip": self.strip,
        }

    def describe(self) -> dict[str, Any]:
        """Return the page's first data: the models, their sizes, and the examples."""
        left, *rest = self.sides.values()
        return {
            "models": {
                name: {field: getattr(side.model, field) for field in _DESCRIBED}
                | {"between": side.vocabulary.between, "note": side.vocabulary.note}
                for name, side in self.sides.items()
            },
            "shared_vocabulary": any(left.vocabulary.words == side.vocabulary.words for side in rest),
            "examples": [_example_json(example) for example in self.examples],
            "draws_examples": bool(self.task_questions),
            "opening": None if self._opening is None else dict(zip(("layer", "head"), self._opening, strict=True)),
            "strip": {
                "factors": list(STRIP_FACTORS) if left.model.subtracts else [],
                "task": None if self.floor is None else {"floor": self.floor, "sequences": len(self.task_questions)},
            },
        }

    def example(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return another example: {"seed": 3}."""
        seed = _whole(question, "seed", 0, (1 << 31) - 1)
        if not self.task_questions:
            raise ValueError("There are no further examples for this model.")
        return _example_json(self.task_questions[seed % len(self.task_questions)])

    def run(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Run a model, and return its predictions with the given λ and with the learned one.

        {"side": "left", "text": … or "tokens": […], "append": […], "lambdas": {…}, "answer": {…}, "picture": 32}: all
        but the text is optional, and "append" are tokens after it. With "picture" the answer has the numbers of all
        heads, and a picture of each of so many pixels a side; without it comes sooner.
        """
        name, side, tokens, settings = self._read(question)
        answer = Answer.read(question.get("answer"), len(tokens))
        picture = _whole(question, "picture", 1, _LARGEST_PICTURE, 0)
        with self._running:
            learned = self._trace(name, tokens, LEARNED)
            now = self._trace(name, tokens, settings)
            result = {
                "side": name,
                "tokens": tokens,
                "pieces": side.vocabulary.pieces(tokens),
                "next": self._next(side, tokens, learned, now),
                "divergence": learned.divergence(now),
                "learned_lambdas": None if learned.lambdas is None else learned.lambdas.tolist(),
            }
            for prefix, trace in (("", now), ("learned_", learned)):
                result[f"{prefix}loss"] = trace.loss
                if answer is not None:
                    shares = answer_shares(trace.maps, side.model.layers, answer)
                    result[f"{prefix}answer_share"] = shares.mean().item()
                    if answer.query == len(tokens) - 1:
                        known = trace.next_log_probabilities[tokens[answer.begin]]
                        result[f"{prefix}answer_probability"] = known.exp().item()
            if picture:
                result["heads"] = head_numbers(now, side.model.layers, side.model.heads, answer, picture)
        return result

    def strip(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return how well the left model does with all λ times a factor: {"factor": 0.5, "text": …, "answer": {…}}.

        {"value": the accuracy at its task}; of a model without one {"value": the probability of the answer after the
        text, or without an answer of the likeliest token with the learned λ, "piece": that token}. The value is null if
        the model and the text are so large that the whole strip would take long.
        """
        settings = LambdaSettings.read({"factor": _field(question, "factor")})
        model = self.sides["left"].model
        with self._running:
            if self.floor is not None:
                if settings.factor not in self._accuracies:
                    self._accuracies[settings.factor] = self._accuracy(settings)
                return {"value": self._accuracies[settings.factor]}
            name, side, tokens, _ = self._read(question)
            if model.takes_long(len(STRIP_FACTORS), tokens):
                return {"value": None}
            answer = Answer.read(question.get("answer"), len(tokens))
            token = int(self._trace(name, tokens, LEARNED).next_log_probabilities.argmax())
            if answer is not None and answer.query == len(tokens) - 1:
                token = tokens[answer.begin]
            value = self._trace(name, tokens, settings).next_log_probabilities[token].exp().item()
        return {"value": value, "piece": side.vocabulary.piece_after(tokens, token)}

    def head_map(self, question: Mapping[str, Any]) -> bytes:
        """Return the maps of one head in the form of :mod:`diff_transformer.explorer.trace`.

        The question is one of :meth:`run` with "layer" and "head", counted from 1, and optionally "first_row", the
        first row to send, counted from 0.
        """
        name, side, tokens, settings = self._read(question)
        layer = _whole(question, "layer", 1, side.model.layers)
        head = _whole(question, "head", 1, side.model.heads)
        first_row = _whole(question, "first_row", 0, len(tokens) - 1, 0)
        with self._running:
            trace = self._trace(name, tokens, settings)
            of_head = trace.maps.of(layer - 1, slice(head - 1, head), first_row)
            return encode_maps(of_head, first_row, trace.maps.is_causal)

    def next_token(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the token that the model writes next: the most likely one, or with "temperature" above 0 a drawn one.

        The draw depends on "seed" and the number of tokens alone, so that a link gives the same text again.
        """
        name, _, tokens, settings = self._read(question)
        temperature, seed = question.get("temperature", 0), _whole(question, "seed", 0, (1 << 31) - 1, 0)
        if type(temperature) not in (int, float) or not 0 <= temperature <= _LARGEST_TEMPERATURE:
            raise ValueError(
                f"temperature must be a number in 0 … {_LARGEST_TEMPERATURE:g}, got {quoted(temperature, 40)}."
            )
        with self._running:
            known = self._trace(name, tokens, settings).next_log_probabilities
        if temperature:
            generator = torch.Generator().manual_seed(seed * 4096 + len(tokens))
            weights = ((known - known.max()) / temperature).exp()
            token = int(torch.multinomial(weights, 1, generator=generator))
        else:
            token = int(known.argmax())
        return {"token": token}

    def _read(self, question: Mapping[str, Any]) -> tuple[str, Side, list[int], LambdaSettings]:
        name = _field(question, "side", "left")
        if not isinstance(name, str) or name not in self.sides:
            raise ValueError(f"side must be {' or '.join(map(repr, self.sides))}, got {quoted(name, 40)}.")
        side = self.sides[name]
        if side.model.grid is not None and question.get("answer") is not None:
            raise ValueError("An image has no answer.")
        tokens, append = question.get("tokens"), question.get("append", [])
        if (question.get("text") is None) == (tokens is None):
            raise ValueError('A question has either "text" or "tokens".')
        if tokens is None:
            tokens = side.vocabulary.encode(question["text"])
        if not isinstance(tokens, list) or not isinstance(append, list):
            raise ValueError('"tokens" and "append" must be lists of numbers.')
        tokens = [*tokens, *append]
        settings = LambdaSettings.read(question.get("lambdas"))
        side.model.check(tokens, settings)
        return name, side, tokens, settings

    @torch.no_grad()
    def _accuracy(self, settings: LambdaSettings) -> float:
        """Return the share of the questions to which the left model's most likely token is the answer's first."""
        side, right = self.sides["left"], 0
        model = side.model.model
        with replaced_lambdas(model, settings, side.model.heads):
            for first in range(0, len(self.task_questions), _BATCH):
                batch = self.task_questions[first : first + _BATCH]
                tokens = [torch.tensor(side.vocabulary.encode(one.text)) for one in batch]
                # What is behind a question changes nothing that is before it.
                input_ids = pad_sequence(tokens, batch_first=True).to(model.device)
                predicted = model(input_ids=input_ids, use_cache=False).logits.argmax(-1)
                places = [(row, one.answer) for row, one in enumerate(batch) if one.answer]
                right += sum(int(predicted[row, at.query] == tokens[row][at.begin]) for row, at in places)
        return right / len(self.task_questions)

    def _trace(self, name: str, tokens: Sequence[int], settings: LambdaSettings) -> Trace:
        """Return the run, from the cache if it is there."""
        key, model = (name, tuple(tokens), repr(settings)), self.sides[name].model
        trace = self._kept.pop(key, None)
        if trace is None:
            trace = model.trace(tokens, settings)
            if trace.next_log_probabilities.isnan().any():
                raise ValueError(
                    f"{model.name} gives NaN for this text, so there is nothing to show; are its weights whole?"
                )
        self._kept[key] = trace  # behind all others
        while len(self._kept) > 2 and (
            len(self._kept) > _KEPT_TRACES
            or sum(held.nbytes for kept in self._kept.values() for held in kept.maps.held) > _KEPT_BYTES
        ):
            del self._kept[next(iter(self._kept))]
        return trace

    def _next(self, side: Side, tokens: list[int], learned: Trace, now: Trace) -> list[dict[str, Any]]:
        """Return the most likely tokens with the given λ, and after them those that were with the learned one."""
        before, after = learned.next_log_probabilities.exp(), now.next_log_probabilities.exp()
        count = min(SHOWN_TOKENS, before.numel())
        chosen = list(dict.fromkeys([*after.topk(count).indices.tolist(), *before.topk(count).indices.tolist()]))
        return [
            {
                "token": token,
                "piece": side.vocabulary.piece_after(tokens, token),
                "probability": after[token].item(),
                "learned_probability": before[token].item(),
            }
            for token in chosen
        ]


def _example_json(example: Example) -> dict[str, Any]:
    return {name: value for name, value in asdict(example).items() if name != "picture" or value is not None}


def _field(question: Any, name: str, default: Any = None) -> Any:
    if not isinstance(question, Mapping):
        raise ValueError("A question must be a JSON object.")
    return question.get(name, default)


def _whole(question: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    value = _field(question, name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number in {least} … {most}, got {quoted(value, 40)}.")
    return value
