"""Wrong requests get a 4xx with one sentence, never a 500; and who has no key gets nothing."""

import json
import math
import urllib.error
import urllib.request
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from diff_transformer.serve.api_requests import ONLY_IN_CHATS, ONLY_IN_COMPLETIONS, ONLY_VALUE, SHARED
from running_server import client_of, new_served, running

COMPLETION = {"model": "tiny", "prompt": "to be", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return answer_to(urllib.request.Request(url.removesuffix("/v1") + path, body, sent))


def answer_to(request: urllib.request.Request) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.load(response) if is_json else response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def refused(url: str, path: str, body: Any, status: int, *parts: str) -> None:
    """The answer has the status and one sentence with all parts."""
    code, answer = post(url, path, json.dumps(body).encode())
    message = answer["error"]["message"]
    assert code == status, message
    assert message.endswith((".", "?"))
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"prompt": None}, 400, "A completion needs a prompt."),
        ({"prompt": 7}, 400, "got 7"),
        ({"prompt": []}, 400, "got []"),
        ({"prompt": ["a", 7]}, 400, "got ['a', 7]"),
        ({"prompt": ["a"] * 1025}, 400, "A request takes at most 1024 prompts, got 1025"),
        ({"prompt": ""}, 400, "The prompt is empty"),
        ({"prompt": [257]}, 400, "Tokens must lie in 0 … 256, got 257"),
        ({"prompt": [[1], [-1]]}, 400, "got -1"),
        ({"prompt": "\ud800"}, 400, "prompt must be valid Unicode"),
        ({"prompt": "a" * 97}, 400, "context of 96 tokens cannot hold the prompt's 97 and 2 new ones"),
        ({"max_tokens": 92}, 400, "context of 96 tokens cannot hold the prompt's 5 and 92 new ones"),
        ({"max_tokens": "2"}, 400, "max_tokens must be a whole number, 0 or more, got '2'"),
        ({"max_tokens": True}, 400, "got True"),
        ({"max_tokens": 2.5}, 400, "got 2.5"),
        ({"max_tokens": -1}, 400, "got -1"),
        ({"max_tokens": 0}, 400, "max_tokens must be 1 or more unless echo is true"),
        ({"model": "other"}, 404, "The model 'other' is not here; this server has 'tiny'"),
        ({"model": 3}, 400, "model must be a text, got 3"),
        ({"temperature": 3}, 400, "temperature must be a number from 0 to 2, got 3"),
        ({"temperature": "hot"}, 400, "got 'hot'"),
        ({"temperature": float("nan")}, 400, "got nan"),
        ({"temperature": 10**400}, 400, "got 1000000000"),
        ({"top_p": 0}, 400, "top_p must be a number above 0 and at most 1, got 0"),
        ({"seed": -1}, 400, "seed must be a whole number"),
        ({"stop": ["a", ""]}, 400, "stop must be a text or a list"),
        ({"stop": {"a": 1}}, 400, "stop must be a text or a list"),
        ({"stream": "yes"}, 400, "stream must be true or false, got 'yes'"),
        ({"stream": True, "prompt": ["a", "b"]}, 400, "A stream takes one prompt, got 2"),
        ({"stream_options": 1}, 400, "stream_options must be an object, got 1"),
        ({"logprobs": 6}, 400, "logprobs must be a whole number, from 0 to 5, got 6"),
        ({"n": 2}, 400, "n must be 1 or left out, got 2"),
        ({"best_of": 2}, 400, "best_of must be 1 or left out, got 2"),
        ({"suffix": "end"}, 400, "suffix must be '' or left out, got 'end'"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty must be 0 or left out, got 0.5"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias must be {} or left out"),
        ({"max_token": 3}, 400, "The field 'max_token' is not known; did you mean 'max_tokens'?"),
        ({"messages": []}, 400, "The field 'messages' is not known"),
        ({"\ud800": 1}, 400, "The field '\\ud800' is not known."),
        ({"generation_config": "{"}, 400, "generation_config is not JSON: "),
        ({"generation_config": "[]"}, 400, "generation_config must be a JSON object, got []"),
        ({"generation_config": '{"num_beams": 4}'}, 400, "generation_config may set do_sample"),
    ],
)
def test_a_wrong_completion(sequential_url: str, changes: dict[str, Any], status: int, message: str) -> None:
    refused(sequential_url, "/v1/completions", {**COMPLETION, **changes}, status, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": None}, "messages must be a list of one message or more, got None"),
        ({"messages": []}, "got []"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role must be a text, got 1"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content must be a text"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "The chat template refuses the messages: no robots"),
        ({"max_completion_tokens": 3}, "Give max_completion_tokens or max_tokens, not both"),
        ({"max_tokens": 0}, "max_tokens must be a whole number, 1 or more, got 0"),
        ({"max_tokens": 80}, "context of 96 tokens cannot hold"),
        ({"tools": [{"type": "function"}]}, "tools must be [] or left out"),
        ({"response_format": {"type": "json_object"}}, "response_format must be {'type': 'text'} or left out"),
        ({"logprobs": True}, "logprobs must be False or left out, got True"),
        ({"prompt": "a"}, "The field 'prompt' is not known"),
    ],
)
def test_a_wrong_chat(url: str, changes: dict[str, Any], message: str) -> None:
    refused(url, "/v1/chat/completions", {**CHAT, **changes}, 400, message)


def test_a_chat_without_a_template(sequential_url: str) -> None:
    refused(sequential_url, "/v1/chat/completions", CHAT, 400, "has no chat template", "/v1/completions")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_body_that_is_no_json(sequential_url: str, body: bytes) -> None:
    code, answer = post(sequential_url, "/v1/completions", body)
    assert code == 400
    assert "body" in answer["error"]["message"]


def test_a_byte_order_mark_before_a_body(sequential_url: str) -> None:
    code, answer = post(sequential_url, "/v1/completions", BOM_UTF8 + json.dumps(COMPLETION).encode())
    assert (code, answer["object"]) == (200, "text_completion")


FIELDS = [*SHARED, *ONLY_VALUE, *ONLY_IN_COMPLETIONS, *ONLY_IN_CHATS, "prompt", "echo", "logprobs", "messages"]
STRANGE = [
    *(None, True, 0, -1, 2.5, 10**400, -(10**400), math.nan, math.inf, "", "tiny", "\ud800", "a" * 5000),
    *(
        [],
        [[]],
        [1, "a"],
        [[1], [10**400]],
        [10**400],
        ["\ud800"],
        [None],
        [{}],
        {},
        {"\ud800": 1},
        {"include_usage": 2},
    ),
    *([{"role": "\ud800", "content": "a"}], [{"role": "a", "content": [{"type": "text", "text": ["a"]}]}]),
    *('{"temperature": "a"}', '{"do_sample": 1, "max_new_tokens": []}', "[[" * 500),
]


@pytest.fixture(scope="module")
def chat_url() -> Iterator[str]:
    with running(new_served(chat=True)) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "right"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/load_model", {})]
)
def test_no_value_of_any_field_is_the_servers_fault(chat_url: str, path: str, right: dict[str, Any]) -> None:
    """There is an answer, or 4xx with a sentence."""
    bodies = [{**right, field: value} for field in FIELDS for value in STRANGE]
    bodies += [{**right, field: 1} for field in ("", "\ud800", "a" * 100_000)]
    for body in bodies:
        code, answer = post(chat_url, path, json.dumps(body).encode())
        assert code < 500, (body, answer)
        if code != 200:
            assert answer["error"]["message"].endswith((".", "?"))
            assert len(answer["error"]["message"]) < 500


def test_a_body_that_is_no_object(sequential_url: str) -> None:
    refused(sequential_url, "/v1/completions", [1], 400, "The body must be a JSON object, got [1]")


def test_a_body_that_is_too_large(sequential_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diff_transformer.serve.application.LARGEST_BODY", 1 << 20)
    refused(sequential_url, "/v1/completions", {"prompt": "a" * (1 << 20)}, 413, "at most 1 MiB")


def test_a_body_of_another_kind(sequential_url: str) -> None:
    """What curl sends without -H."""
    code, answer = post(sequential_url, "/v1/completions", b"{}", Content_Type="application/x-www-form-urlencoded")
    assert code == 415
    assert "application/json" in answer["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/engines", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_route(sequential_url: str, method: str, path: str, status: int) -> None:
    code, answer = answer_to(urllib.request.Request(sequential_url.removesuffix("/v1") + path, method=method))
    assert code == status
    assert f"{method} {path} is not served; there are GET /health, " in answer["error"]["message"]
    assert "GET /v1/models/NAME, " in answer["error"]["message"]


def test_an_unknown_model(sequential: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        sequential.models.retrieve("gpt-5")


def test_the_server_itself_fails(
    sequential_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients are told that it is not their fault, and no more."""
    monkeypatch.setattr("diff_transformer.serve.application.completion_request", lambda body: 1 / 0)
    code, answer = post(sequential_url, "/v1/completions", json.dumps(COMPLETION).encode())
    assert (code, answer["error"]["type"]) == (500, "server_error")
    assert answer["error"]["message"] == "The server failed: ZeroDivisionError."


@pytest.fixture(scope="module")
def guarded_url() -> Iterator[str]:
    with running(new_served(), api_key="secret") as address:
        yield address


def test_whoever_has_the_key_is_answered(guarded_url: str) -> None:
    with client_of(guarded_url, "secret") as client:
        assert client.completions.create(**COMPLETION).choices
        assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("key", ["Secret", "secret2", "s"])
def test_whoever_has_another_key_is_not(guarded_url: str, key: str) -> None:
    with client_of(guarded_url, key) as client:
        with pytest.raises(openai.AuthenticationError, match="not the server's"):
            client.completions.create(**COMPLETION)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_nor_who_has_none(guarded_url: str) -> None:
    assert post(guarded_url, "/v1/completions", b"{")[0] == 401
    code, answer = post(guarded_url, "/v1/completions", b"{", Authorization="Basic secret")
    assert (code, answer["error"]["type"]) == (401, "authentication_error")
    assert answer_to(urllib.request.Request(guarded_url.removesuffix("/v1") + "/health")) == (200, {"status": "ok"})
