"""Completions and chats through the `openai` client, one after another and in one batch."""

import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from diff_lab.data import byte_tokenizer
from diff_transformer.serve.completion import ServedModel
from diff_transformer.serve.requests import ChatRequest
from running_server import client_of, new_model, new_served, running

PROMPT = "to be, or not"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **settings: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "temperature": 0, **settings})


def streamed(client: openai.OpenAI, **settings: Any) -> tuple[str, str, int]:
    """The text, why it ends, and its number of new tokens, from a stream."""
    events = list(complete(client, stream=True, stream_options={"include_usage": True}, **settings))
    reasons = [event.choices[0].finish_reason for event in events[:-1]]
    assert reasons[:-1] == [None] * (len(events) - 2)
    assert events[-1].choices == []
    return "".join(event.choices[0].text for event in events[:-1]), reasons[-1], events[-1].usage.completion_tokens


def at_once(client: openai.OpenAI, **settings: Any) -> tuple[str, str, int]:
    answer = complete(client, **settings)
    return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens


both = pytest.mark.parametrize("written", [streamed, at_once])


def test_the_server_names_its_model_and_writes_16_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    assert complete(client).usage.completion_tokens == 16
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@both
@pytest.mark.parametrize("new", [1, 24])
def test_the_text_is_that_of_generate(client: openai.OpenAI, alone: Callable[..., str], written: Any, new: int) -> None:
    assert written(client, max_tokens=new) == (alone(PROMPT, new), "length", new)
    assert written(client, max_tokens=new, echo=True) == (PROMPT + alone(PROMPT, new), "length", new)


@both
def test_a_text_ends_before_a_stop_string(client: openai.OpenAI, alone: Callable[..., str], written: Any) -> None:
    whole = alone(PROMPT, 40)
    text, reason, count = written(client, max_tokens=40, stop=["\0never\0", whole[9:12]])
    assert (text, reason) == (whole[: whole.index(whole[9:12])], "stop")
    assert count < 40


def test_several_prompts_as_texts_and_as_tokens(client: openai.OpenAI, alone: Callable[..., str]) -> None:
    prompts = ["a", "to be", "λ, λ and λ"]
    expected = [alone(prompt, 8) for prompt in prompts]
    as_tokens = [byte_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    for given in (prompts, as_tokens):
        answer = complete(client, given, max_tokens=8)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert complete(client, as_tokens[1], max_tokens=8).choices[0].text == expected[1]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_end_of_text_is_a_stop_even_as_the_last_token_allowed(logprobs: int | None) -> None:
    most_likely = int(expected_logprobs(PROMPT)[1][-1].argmax())
    for ends, reason in (([256, most_likely], "stop"), (256, "length")):
        model = new_model()
        model.generation_config.eos_token_id = ends
        served = ServedModel(model, byte_tokenizer(), "tiny")
        with running(served) as url, client_of(url) as client:
            assert complete(client, max_tokens=1, logprobs=logprobs).choices[0].finish_reason == reason


def test_each_request_has_its_own_temperature(client: openai.OpenAI, alone: Callable[..., str]) -> None:
    answer = complete(client, [PROMPT] * 6, max_tokens=12, temperature=2)
    assert len({choice.text for choice in answer.choices}) > 4
    assert complete(client, max_tokens=12).choices[0].text == alone(PROMPT, 12)
    assert len({choice.text for choice in complete(client, [PROMPT] * 6, max_tokens=12, temperature=1e-4).choices}) == 1


def test_of_equally_likely_tokens_the_first_is_taken() -> None:
    """As `generate` does. Numbers of 16 bits are often equal."""
    model = new_model()
    model.lm_head.weight.data[:].zero_()
    served = ServedModel(model, byte_tokenizer(), "tiny")
    with running(served) as url, client_of(url) as client:
        assert complete(client, max_tokens=8).choices[0].text == "\0" * 8


def test_a_seed_gives_the_text_that_generate_samples(sequential: openai.OpenAI) -> None:
    ids = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    choice: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        out = new_model().generate(ids, max_new_tokens=20, do_sample=True, top_k=0, pad_token_id=0, **choice)
    expected = byte_tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    complete(sequential, temperature=1)
    assert complete(sequential, max_tokens=20, seed=3, **choice).choices[0].text == expected
    assert complete(sequential, max_tokens=20, seed=4, **choice).choices[0].text != expected


def test_each_token_is_one_of_those_that_top_p_leaves(client: openai.OpenAI) -> None:
    ids, rows = expected_logprobs(PROMPT)
    likely, order = rows[-1].exp().sort(descending=True)
    left = set(order[: int((likely.cumsum(0) < 0.8).sum()) + 1].tolist())
    answer = complete(client, [ids] * 16, temperature=1, top_p=0.8, max_tokens=1, logprobs=0)
    drawn = torch.tensor([choice.logprobs.token_logprobs[0] for choice in answer.choices], dtype=torch.float64)
    tokens = (rows[-1] - drawn[:, None]).abs().argmin(-1)
    assert rows[-1][tokens].tolist() == pytest.approx(drawn.tolist(), abs=1e-10)
    assert set(tokens.tolist()) <= left
    assert 1 < len(set(tokens.tolist())) < 250


def chat(client: openai.OpenAI, *contents: Any, **settings: Any) -> Any:
    messages: Any = [{"role": "user", "content": content} for content in contents]
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "temperature": 0, **settings})


def test_a_chat_follows_the_template(client: openai.OpenAI, alone: Callable[..., str]) -> None:
    expected = alone("user: hello\nuser: you\nassistant: ", 10)
    answer = chat(client, "hello", [{"type": "text", "text": "y"}, {"type": "text", "text": "ou"}], max_tokens=10)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected
    events = list(chat(client, "hello", "you", max_completion_tokens=10, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == expected
    assert events[-1].choices[0].finish_reason == "length"
    answer = chat(client, "hello")  # as long as the context has space
    assert answer.usage.total_tokens == 96 or answer.choices[0].finish_reason == "stop"
    served, end = new_served(chat=True), "<|endoftext|>"
    beginning = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 256)])
    served.tokenizer.backend_tokenizer.post_processor = beginning
    (job,) = served.prepare(ChatRequest(messages=[{"role": "user", "content": "hi"}]))
    assert 256 not in job.prompt, "the template alone says how a text begins"


def expected_logprobs(text: str) -> tuple[list[int], torch.Tensor]:
    """The tokens of a text, and the model's log-probabilities of what follows each."""
    ids = byte_tokenizer()(text)["input_ids"]
    with torch.no_grad():
        return ids, new_model()(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_texts_are_scored_one_at_a_time_in_one_thread() -> None:
    """The logits of many long texts would not fit into memory, and a thread that has computed slows down others."""
    served = new_served()
    computing = [0, 0]  # now, and at most
    threads = set()

    def enter(*_: Any) -> None:
        threads.add(threading.current_thread())
        computing[0] += 1
        computing[1] = max(computing)
        time.sleep(0.01)

    def leave(*_: Any) -> None:
        computing[0] -= 1

    served._model.register_forward_pre_hook(enter)
    served._model.register_forward_hook(leave)
    with running(served) as url, client_of(url) as client:
        answer = complete(client, [PROMPT] * 8, max_tokens=1, logprobs=1, echo=True)
        assert len({str(choice.logprobs) for choice in answer.choices}) == 1
        assert computing == [0, 1]
        assert len(threads) == 1


@pytest.mark.parametrize("new", [0, 1])
def test_logprobs_of_a_prompt_are_those_of_a_forward_pass(client: openai.OpenAI, new: int) -> None:
    ids, rows = expected_logprobs(PROMPT)
    choice = complete(client, max_tokens=new, echo=True, logprobs=3).choices[0]
    given = choice.logprobs
    assert len(given.tokens) == len(given.text_offset) == len(ids) + new
    assert given.tokens[: len(ids)] == list(PROMPT)
    assert given.text_offset == list(range(len(ids) + new))
    assert given.token_logprobs[0] is given.top_logprobs[0] is None
    own = [float(row[token]) for row, token in zip(rows, ids[1:], strict=False)]
    assert given.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-10)
    assert [max(top.values()) for top in given.top_logprobs[1:]] == pytest.approx(
        [float(row.max()) for row in rows[: len(ids) - 1 + new]], abs=1e-10
    )
    assert all(3 <= len(top) <= 4 for top in given.top_logprobs[1:])
    if new:
        assert given.token_logprobs[-1] == pytest.approx(float(rows[-1].max()), abs=1e-10)


def test_logprobs_of_new_tokens(client: openai.OpenAI, alone: Callable[..., str]) -> None:
    choice = complete(client, max_tokens=8, logprobs=0).choices[0]
    given = choice.logprobs
    assert choice.text == alone(PROMPT, 8)
    assert (len(given.tokens), given.text_offset[0]) == (8, 0)
    assert [list(top.values()) for top in given.top_logprobs] == [[value] for value in given.token_logprobs]
    # Greedy: each is the largest there is.
    ids = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    with torch.no_grad():
        out = new_model().generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        rows = new_model()(out).logits[0].log_softmax(-1)[ids.shape[1] - 1 : -1]
    assert given.token_logprobs == pytest.approx(rows.amax(-1).tolist(), abs=1e-10)


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_up_to_a_stop_string(client: openai.OpenAI, alone: Callable[..., str], echo: bool) -> None:
    """Those of the tokens that begin before it, and no others."""
    asked: dict[str, Any] = {"max_tokens": 40, "echo": echo, "logprobs": 1}
    unstopped = complete(client, **asked).choices[0]
    stop = alone(PROMPT, 40)[9:12]
    choice = complete(client, **asked, stop=["\0never\0", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (unstopped.text[: unstopped.text.index(stop)], "stop")
    count = sum(offset < len(choice.text) for offset in unstopped.logprobs.text_offset)
    assert len(PROMPT) * echo + 2 < count < len(unstopped.logprobs.tokens)
    given, whole = choice.logprobs, unstopped.logprobs
    assert (given.tokens, given.text_offset) == (whole.tokens[:count], whole.text_offset[:count])
    assert given.token_logprobs[1:] == pytest.approx(whole.token_logprobs[1:count], abs=1e-10)


def test_the_settings_of_a_checkpoint_choose_no_tokens(alone: Callable[..., str]) -> None:
    """Penalties, beams and suppressed tokens of a generation_config.json."""
    model = new_model()
    settings = {"repetition_penalty": 5.0, "num_beams": 2, "suppress_tokens": [101, 32], "stop_strings": ["e"]}
    model.generation_config.update(**settings)
    served = ServedModel(model, byte_tokenizer(), "tiny")
    with running(served) as url, client_of(url) as client:
        assert complete(client, max_tokens=12).choices[0].text == alone(PROMPT, 12)
