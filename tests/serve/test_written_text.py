"""What a server writes is what the model wrote, whichever kind the tokenizer is of: whole, in parts, by tokens."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diff_transformer.serve.completion import ServedModel
from running_server import client_of, new_model, running
from tokenizer_kinds import KINDS

PROMPT = "def f(x):\n    if x:\n  \u3000☃\U0001f600 to"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module", params=["GPT-2's", "Llama 2's"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def client(tokenizer: Any) -> Iterator[openai.OpenAI]:
    served = ServedModel(new_model(vocabulary=len(tokenizer)), tokenizer, "tiny")
    with running(served) as url, client_of(url) as opened:
        yield opened


@pytest.mark.parametrize("as_tokens", [False, True])
def test_texts_are_those_of_decode(client: openai.OpenAI, tokenizer: Any, as_tokens: bool) -> None:
    prompt = tokenizer(PROMPT)["input_ids"]
    model, end = new_model(vocabulary=len(tokenizer)), tokenizer.eos_token_id
    (out,) = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=end).tolist()
    before, whole = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (prompt, out))
    for echo in (False, True):
        asked = {**ASKED, "prompt": prompt if as_tokens else PROMPT, "echo": echo}
        expected = PROMPT * echo + whole.removeprefix(before)
        assert client.completions.create(**asked, logprobs=2).choices[0].text == expected
        assert "".join(event.choices[0].text for event in client.completions.create(**asked, stream=True)) == expected


@pytest.mark.parametrize("new", [1, 24])
def test_tokens_are_named_by_what_they_add(client: openai.OpenAI, tokenizer: Any, new: int) -> None:
    asked = {**ASKED, "max_tokens": new, "logprobs": 2}
    choice = client.completions.create(**asked, echo=True).choices[0]
    names, count = choice.logprobs.tokens, len(tokenizer(PROMPT)["input_ids"])
    assert "<0x9F>" in names[:count]
    added = [re.sub("<0x[0-9A-F]{2}>", "", name) for name in names[:count]]
    assert "".join(added) == PROMPT
    for name, offset in zip(added, choice.logprobs.text_offset, strict=False):
        assert choice.text[offset : offset + len(name)] == name
    assert "\ufffd" not in "".join([*names, *(name for top in choice.logprobs.top_logprobs if top for name in top)])
    assert all(name in top for name, top in zip(names, choice.logprobs.top_logprobs, strict=True) if top)
    # The same names without the prompt.
    assert client.completions.create(**asked).choices[0].logprobs.tokens == names[count:]


def test_a_text_goes_on_with_a_space_and_an_answer_in_a_chat_begins_anew() -> None:
    """As with Llama 2's tokenizer: a word has its space before it, and a text begins without one."""
    backend = Tokenizer(models.WordLevel({f"\u2581w{number}": number for number in range(257)}, unk_token="\u2581w0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="\u2581w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(ServedModel(new_model(), tokenizer, "tiny")) as url, client_of(url) as client:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 1}
        text = client.completions.create(**asked, prompt="w5 w6").choices[0].text
        assert text.startswith(" w")
        assert (
            client.completions.create(**asked, prompt="w5 w6", logprobs=0, echo=True).choices[0].text == f"w5 w6{text}"
        )
        answer = client.chat.completions.create(**asked, messages=[{"role": "user", "content": "w5 w6"}])
    assert answer.choices[0].message.content == text.removeprefix(" ")
