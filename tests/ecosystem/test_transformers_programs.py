"""Pipelines of transformers, which find the model by its name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diff_lab.data import byte_tokenizer
from running_server import TEMPLATE, new_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    new_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_pipeline_generates(folder: Path) -> None:
    ids = torch.tensor([byte_tokenizer()("to be")["input_ids"]])
    out = new_model().generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    settings = {"max_new_tokens": 12, "do_sample": False, "max_length": None}
    generator = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float64)
    (answer,) = generator("to be", **settings)
    assert answer["generated_text"] == byte_tokenizer().decode(out[0])
    answers = generator(["to be", "to"], batch_size=2, **settings)
    assert answers[0][0]["generated_text"] == byte_tokenizer().decode(out[0])


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("text-classification", transformers.AutoModelForSequenceClassification),
        ("token-classification", transformers.AutoModelForTokenClassification),
        ("feature-extraction", transformers.AutoModel),
    ],
)
def test_pipelines_of_other_tasks(task: str, kind: Any, folder: Path, tmp_path: Path) -> None:
    kind.from_config(new_model().config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    answer = transformers.pipeline(task, model=str(tmp_path))("to be")
    expected = kind.from_pretrained(tmp_path)(torch.tensor([byte_tokenizer()("to be")["input_ids"]]))
    if task == "feature-extraction":
        torch.testing.assert_close(torch.tensor(answer), expected.last_hidden_state)
    else:
        scores = torch.atleast_2d(expected.logits.squeeze(0)).softmax(-1).amax(-1)
        assert [each["score"] for each in answer] == pytest.approx(scores.tolist(), rel=1e-5)


def test_a_pipeline_chats(folder: Path) -> None:
    ids = torch.tensor([byte_tokenizer()("user: hi\nassistant: ")["input_ids"]])
    out = new_model().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    generator = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float64)
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = generator(messages, max_new_tokens=8, do_sample=False, max_length=None)
    assert answer["generated_text"][-1] == {"role": "assistant", "content": byte_tokenizer().decode(out)}
