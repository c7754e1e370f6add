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
NEW = 24


@pytest.fixture(scope="module", params=["GPT-2's", "Llama 2's"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


@pytest.fixture(scope="module", params=[False, True], ids=["sequential", "batching"])
def client(request: pytest.FixtureRequest, tokenizer: Any) -> Iterator[openai.OpenAI]:
    served = ServedModel(new_model(vocabulary=len(tokenizer)), tokenizer, "tiny", continuous_batching=request.param)
    with running(served) as url, client_of(url) as opened:
        yield opened


def generated(tokenizer: Any, prompt: list[int]) -> tuple[str, list[int]]:
    """The text behind a prompt's, and its tokens."""
    model = new_model(vocabulary=len(tokenizer))
    end = tokenizer.eos_token_id
    (out,) = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=end).tolist()
    before, whole = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (prompt, out))
    return whole.removeprefix(before), out[len(prompt) :]


def completed(client: openai.OpenAI, **settings: Any) -> tuple[str, dict[str, list[Any]]]:
    """The text and the log-probabilities."""
    asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": NEW, "logprobs": 2, **settings}
    answer = client.completions.create(**asked)
    choices = [part.choices[0] for part in (list(answer) if asked.get("stream") else [answer])]
    numbers = [choice.logprobs for choice in choices if choice.logprobs is not None]
    fields = {
        name: [value for part in numbers for value in getattr(part, name)]
        for name in ("tokens", "text_offset", "top_logprobs")
    }
    return "".join(choice.text for choice in choices), fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_texts_are_those_of_decode(client: openai.OpenAI, tokenizer: Any, stream: bool, as_tokens: bool) -> None:
    tokens = tokenizer(PROMPT)["input_ids"]
    expected = generated(tokenizer, tokens)[0]
    settings = {"stream": stream, "prompt": tokens if as_tokens else PROMPT, "logprobs": None}
    assert completed(client, **settings)[0] == expected
    assert completed(client, **settings, echo=True)[0] == PROMPT + expected
    if not stream:
        assert completed(client, **{**settings, "logprobs": 1})[0] == expected


@pytest.mark.parametrize("new", [1, NEW])
def test_tokens_are_named_by_what_they_add(client: openai.OpenAI, tokenizer: Any, new: int) -> None:
    text, fields = completed(client, echo=True, max_tokens=new)
    prompt = tokenizer(PROMPT)["input_ids"]
    names = fields["tokens"]
    assert len(names) == len(prompt) + len(generated(tokenizer, prompt)[1][:new])
    of_prompt = names[: len(prompt)]
    assert "<0x9F>" in of_prompt
    added = [re.sub("<0x[0-9A-F]{2}>", "", name) for name in of_prompt]
    assert "".join(added) == PROMPT
    for name, offset in zip(added, fields["text_offset"], strict=False):
        assert text[offset : offset + len(name)] == name
    everything = [*names, *(name for top in fields["top_logprobs"] if top for name in top)]
    assert "\ufffd" not in "".join(everything)
    assert all(name in top for name, top in zip(names, fields["top_logprobs"], strict=True) if top)
    # The same names without the prompt.
    assert completed(client, max_tokens=new)[1]["tokens"] == names[len(prompt) :]


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a word has its space before it, and a text begins without one."""
    vocabulary = {f"\u2581w{number}": number for number in range(257)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\u2581w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\u2581w0")


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("settings", [{}, {"logprobs": 1}, {"stream": True}, {"max_tokens": 1, "logprobs": 0}], ids=str)
def test_a_server_writes_the_space(batching: bool, settings: dict[str, Any]) -> None:
    tokenizer = spaced_tokenizer()
    served = ServedModel(new_model(), tokenizer, "tiny", continuous_batching=batching)
    with running(served) as url, client_of(url) as client:
        asked = {"model": "tiny", "prompt": "w5 w6", "temperature": 0, "max_tokens": 4, **settings}
        texts = []
        for echo in (False, True):
            answer = client.completions.create(**asked, echo=echo)
            parts = list(answer) if settings.get("stream") else [answer]
            texts.append("".join(part.choices[0].text for part in parts))
    assert texts[0].startswith(" w")
    assert texts[1] == "w5 w6" + texts[0]


def test_an_answer_in_a_chat_begins_anew() -> None:
    tokenizer = spaced_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(ServedModel(new_model(), tokenizer, "tiny")) as url, client_of(url) as client:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 3}
        text = client.completions.create(prompt="w5 w6", **asked).choices[0].text
        answer = client.chat.completions.create(messages=[{"role": "user", "content": "w5 w6"}], **asked)
    assert answer.choices[0].message.content == text.removeprefix(" ") != text
