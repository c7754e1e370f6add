"""Heads for classifying texts and tokens and for question answering, over the same base model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from diff_transformer import (
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS: dict[str, tuple[Any, Any]] = {
    "sequence": (DiffTransformerForSequenceClassification, AutoModelForSequenceClassification),
    "token": (DiffTransformerForTokenClassification, AutoModelForTokenClassification),
    "question": (DiffTransformerForQuestionAnswering, AutoModelForQuestionAnswering),
}


@pytest.fixture
def make_head(make: Any) -> Any:
    """(head, kind, **config) → a model with that head over the weights of ``make``, in float64, in evaluation mode."""

    def make_head(head: str, kind: str, **config: Any) -> Any:
        language_model = make(kind, num_labels=3, pad_token_id=0, **config)
        torch.manual_seed(7)
        model = HEADS[head][0](language_model.config).double().eval()
        model.model.load_state_dict(language_model.model.state_dict())
        return model

    return make_head


def labels_of(head: str, tokens: Tensor) -> dict[str, Tensor]:
    if head == "question":
        return {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([2, 8])}
    return {"labels": torch.tensor([2, 0]) if head == "sequence" else tokens % 3}


def test_one_label_a_text(kind: str, make_head: Any, tokens: Any, check: Any) -> None:
    """The last token that is no padding, wherever the padding stands; the loss is the cross-entropy."""
    model, inputs = make_head("sequence", kind), tokens()
    hidden = model.model(inputs).last_hidden_state
    logits = model(inputs).logits
    assert logits.shape == (2, 3)
    check(logits, hidden[:, -1] @ model.score.weight.T)
    for on_the_left in (True, False):
        sides = (3, 0) if on_the_left else (0, 3)
        padded, mask = F.pad(inputs, sides), F.pad(torch.ones_like(inputs), sides)
        # Positions are counted over the padding as well: only distances matter, up to the tables' float32.
        check(model(padded, attention_mask=mask).logits, logits, dtype=torch.float32)
    labels = torch.tensor([2, 0])
    loss = model(inputs, labels=labels).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))
    model.config.problem_type = "multi_label_classification"
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(model(inputs, labels=several).loss, F.binary_cross_entropy_with_logits(logits, several))


def test_one_label_a_token(kind: str, make_head: Any, tokens: Any, check: Any) -> None:
    model, inputs = make_head("token", kind), tokens()
    hidden = model.model(inputs).last_hidden_state
    labels = inputs % 3
    labels[0, :4] = -100
    out = model(inputs, labels=labels)
    check(out.logits, hidden @ model.score.weight.T + model.score.bias)
    expected = F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(out.loss, expected, check_dtype=False)


def test_begin_and_end_of_an_answer(kind: str, make_head: Any, tokens: Any, check: Any) -> None:
    model, inputs = make_head("question", kind), tokens()
    hidden = model.model(inputs).last_hidden_state
    out = model(inputs, **labels_of("question", inputs))
    logits = hidden @ model.qa_outputs.weight.T + model.qa_outputs.bias
    check(out.start_logits, logits[..., 0])
    check(out.end_logits, logits[..., 1])
    targets = torch.tensor([1, 4]), torch.tensor([2, 8])
    expected = sum(F.cross_entropy(logits[..., i], target) for i, target in enumerate(targets)) / 2
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("head", HEADS)
def test_from_a_language_model(head: str, kind: str, make: Any, tokens: Any, check: Any, tmp_path: Path) -> None:
    """Its base model is taken over and the new head is initialised; saved and loaded, it is the same model again."""
    language_model, inputs = make(kind, torch.float32, num_labels=3, pad_token_id=0), tokens()
    language_model.save_pretrained(tmp_path)
    head_class, auto_class = HEADS[head]
    model, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is head_class
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"qa_outputs" if head == "question" else "score"}
    assert {*info["unexpected_keys"]} <= {"lm_head.weight"}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    check(model.model(inputs).last_hidden_state, language_model.model(inputs).last_hidden_state)
    model.save_pretrained(tmp_path / "head")
    again = auto_class.from_pretrained(tmp_path / "head", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        expected = parameter if ".lam." in name else parameter.bfloat16()
        assert torch.equal(again.get_parameter(name), expected), name
