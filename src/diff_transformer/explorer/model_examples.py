"""Reads the examples.json beside a model: texts to open it with, and the words of a model that has no tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from diff_transformer.explorer.explorer import Example
from diff_transformer.explorer.head_numbers import Answer
from diff_transformer.utils.files import read_json

EXAMPLES = "examples.json"


@dataclass(frozen=True)
class ModelExamples:
    """The content of an examples.json.

    Attributes:
        examples: texts of the task that the model was trained on.
        words: the word of each token, of a model without a tokenizer.
        note: a sentence or two on how to write such a text.
        floor: the accuracy of a guess among what a text holds, where the answer to every example is one token.
    """

    examples: tuple[Example, ...] = ()
    words: tuple[str, ...] = ()
    note: str = ""
    floor: float | None = None

    @property
    def questions(self) -> tuple[Example, ...]:
        """The examples whose answer is known."""
        return tuple(example for example in self.examples if example.answer is not None)


def read_examples(file: Path) -> ModelExamples:
    """Read an examples.json.

    Raises:
        ValueError: the file is not JSON, or holds something else.
    """
    content = read_json(file)
    try:
        floor = content.get("floor")
        examples = [(one["title"], one["text"], one.get("answer")) for one in content["examples"]]
        return ModelExamples(
            examples=tuple(
                Example(str(title), str(text), answer and Answer(**answer)) for title, text, answer in examples
            ),
            words=tuple(map(str, content.get("words", ()))),
            note=str(content.get("note", "")),
            floor=None if floor is None else float(floor),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(file)!r} holds no examples as `diff-transformer explore` reads them: {error}") from None
