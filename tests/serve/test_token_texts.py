"""New tokens as text, one after another, as they read behind the prompt."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diff_transformer.data import byte_tokenizer
from diff_transformer.serve.served_model import ServedModel
from diff_transformer.serve.token_texts import TokenTexts
from running_server import client_of, new_model, running


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: a word has its space before it, and a text begins without one."""
    vocabulary = {f"\u2581w{number}": number for number in range(257)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\u2581w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\u2581w0")


def read(tokenizer: Any, tokens: list[int], **settings: Any) -> str:
    texts = TokenTexts(tokenizer, **settings)
    return "".join(texts.read(token).text for token in tokens)


def test_a_word_after_others_keeps_its_space() -> None:
    tokenizer = spaced_tokenizer()
    prompt, new = list(range(1, 40)), [7, 8]
    assert read(tokenizer, new) == "w7 w8"
    assert read(tokenizer, new, before=prompt) == " w7 w8"
    assert tokenizer.decode(prompt) + read(tokenizer, new, before=prompt) == tokenizer.decode(prompt + new)


def test_a_character_that_has_only_begun_is_not_repeated() -> None:
    assert read(byte_tokenizer(), [*b"b"], before=[*"aé".encode()[:-1]]) == "b"
    assert read(byte_tokenizer(), [*"é!".encode()], before=[*"aé".encode()]) == "é!"


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
