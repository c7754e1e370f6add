"""Writes the model card, README.md, of a model that is shared; the laboratory adds how it was trained and measured."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from diff_transformer._version import INSTALL, __version__
from diff_transformer.attention_types import ATTENTION_TYPES

# An entry point of this group makes of (folder, results files) an object whose ``text`` takes the `Exported`; there is
# one where diff-transformer-lab is installed.
CARDS = "diff_transformer.export_card"

# Auto class → the name of its task on the Hub. The base model has no task.
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


@dataclass(frozen=True)
class Exported:
    """A model that is shared.

    Attributes:
        name: the model's, for the card.
        model: the model.
        tokenizer: its tokenizer, if it has one.
        auto_class: the class of transformers that loads it, such as "AutoModelForCausalLM".
        is_graph: whether it is shared as an ONNX graph, and not as a folder for transformers.
        license: the Hub's name of a licence, if it has one.
    """

    name: str
    model: Any
    tokenizer: Any
    auto_class: str
    is_graph: bool = False
    license: str | None = None

    @property
    def task(self) -> str | None:
        """The Hub's name of the model's task."""
        return TASKS.get(self.auto_class)


def export_card(folder: Path, results: list[Path]) -> Callable[[Exported], str]:
    """Return the writer of the card of the model in a folder: the laboratory's if it is installed, else the plain one.

    Args:
        folder: of the model.
        results: results files of the laboratory, which the card is to show.

    Raises:
        ValueError: results are named, and the laboratory is not installed, or they are not valid.
    """
    for entry in entry_points(group=CARDS):
        text: Callable[[Exported], str] = entry.load()(folder, results).text
        return text
    if results:
        raise ValueError("--results needs the package diff-transformer-lab, which reads results files.")
    return plain_card


def plain_card(exported: Exported) -> str:
    """Write a card that says how to load the model, repeats its configuration, and claims nothing else."""
    config = exported.model.config
    front = ModelCardData(
        license=exported.license,
        library_name="onnx" if exported.is_graph else "transformers",
        pipeline_tag=exported.task if exported.tokenizer is not None else None,
        tags=["diff-transformer", "arxiv:2410.05258", *(["onnx"] if exported.is_graph else [])],
    )
    kind = "language model" if exported.task == "text-generation" else "Transformer"
    parameters = sum(parameter.numel() for parameter in exported.model.parameters())
    return f"""---
{front.to_yaml()}
---

# {exported.name}

A {kind} {ATTENTION_TYPES[config.attention_type].summary}

## Load it

{_loading(exported)}
## What it is

|  |  |
| --- | --- |
| attention | {config.attention_type} |
| parameters | {parameters:,} |
| layers | {config.num_hidden_layers} of width {config.hidden_size} |
| heads | {config.num_attention_heads} of width {config.head_dim} (as the Transformer counts them) |
| context | {config.max_position_embeddings:,} tokens |

How it was trained is not recorded, and nothing is claimed about how good it is.
"""


def _loading(exported: Exported) -> str:
    if exported.is_graph:
        return f"""```python
import onnxruntime

session = onnxruntime.InferenceSession("{exported.name}/model.onnx")
print([slot.name for slot in session.get_inputs()], [slot.name for slot in session.get_outputs()])
```
"""
    auto = exported.auto_class
    names = auto if exported.tokenizer is None else f"{auto}, AutoTokenizer"
    tokenizer = "" if exported.tokenizer is None else f'\ntokenizer = AutoTokenizer.from_pretrained("{exported.name}")'
    return f"""It needs the Python package diff-transformer, {__version__} or later: {INSTALL}.

```python
import diff_transformer  # which makes transformers know the model
from transformers import {names}

model = {auto}.from_pretrained("{exported.name}"){tokenizer}
```

Without that import, `trust_remote_code=True` loads it: the folder's two code files import the package.

"""
