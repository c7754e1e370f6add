"""Pipelines of transformers, which find the model by its name."""

from pathlib import Path

import torch
import transformers

from diff_lab.data import byte_tokenizer
from running_server import new_model


def test_a_pipeline_generates(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    ids = torch.tensor([byte_tokenizer()("to be")["input_ids"]])
    out = new_model().generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    settings = {"max_new_tokens": 12, "do_sample": False, "max_length": None}
    generator = transformers.pipeline("text-generation", model=str(tmp_path), dtype=torch.float64)
    answers = generator(["to be", "to"], batch_size=2, **settings)
    assert answers[0][0]["generated_text"] == byte_tokenizer().decode(out[0])
