"""Wrong requests get a 4xx with one sentence, never a 500; and who has no key gets nothing."""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from diff_transformer.serve.requests import NEUTRAL, ChatRequest, CompletionRequest
from running_server import client_of, new_served, running

COMPLETION = {"model": "tiny", "prompt": "to be", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def chat_url() -> Iterator[str]:
    with running(new_served(chat=True)) as address:
        yield address


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
        ({"prompt": None}, 400, "prompt: Field required."),
        ({"prompt": 7}, 400, "prompt: Input should be a valid array, got 7."),
        ({"prompt": []}, 400, "got []"),
        ({"prompt": ["a", 7]}, 400, "got 7"),
        ({"prompt": ["a"] * 1025}, 400, "at most 1024 items"),
        ({"prompt": ""}, 400, "The prompt is empty"),
        ({"prompt": [257]}, 400, "Tokens must lie in 0 … 256, got 257"),
        ({"prompt": [[1], [-1]]}, 400, "got -1"),
        ({"prompt": "a" * 97}, 400, "context of 96 tokens cannot hold the prompt's 97 and 2 new ones"),
        ({"max_tokens": 92}, 400, "context of 96 tokens cannot hold the prompt's 5 and 92 new ones"),
        ({"max_tokens": "2"}, 400, "max_tokens: Input should be a valid integer, got '2'."),
        ({"max_tokens": True}, 400, "got True"),
        ({"max_tokens": -1}, 400, "max_tokens: Input should be greater than or equal to 0, got -1."),
        ({"model": "other"}, 404, "The model 'other' is not here; this server has 'tiny'."),
        ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2, got 3."),
        ({"top_p": 0}, 400, "top_p: Input should be greater than 0, got 0."),
        ({"stop": ["a", ""]}, 400, "stop.1: String should have at least 1 character"),
        ({"stream": True, "prompt": ["a", "b"]}, 400, "A stream takes one prompt and has no logprobs"),
        ({"stream": True, "logprobs": 1}, 400, "A stream takes one prompt and has no logprobs"),
        ({"logprobs": 6}, 400, "logprobs: Input should be less than or equal to 5, got 6."),
        ({"n": 2}, 400, "n must be 1 or left out, got 2."),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias must be {} or left out, got {'5': 1}."),
        ({"max_token": 3}, 400, "The field 'max_token' is not known here; did you mean 'max_tokens'?"),
    ],
)
def test_a_wrong_completion(sequential_url: str, changes: dict[str, Any], status: int, message: str) -> None:
    refused(sequential_url, "/v1/completions", {**COMPLETION, **changes}, status, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages.0.role: Input should be a valid string, got 1."),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "The chat template refuses the messages: no robots"),
        ({"max_completion_tokens": 3}, "Give max_completion_tokens or max_tokens, not both"),
        ({"max_tokens": 80}, "context of 96 tokens cannot hold"),
        ({"tools": [{"type": "function"}]}, "tools must be [] or left out"),
        ({"logprobs": True}, "logprobs: Input should be False, got True."),
    ],
)
def test_a_wrong_chat(chat_url: str, changes: dict[str, Any], message: str) -> None:
    refused(chat_url, "/v1/chat/completions", {**CHAT, **changes}, 400, message)


def test_a_chat_without_a_template(sequential_url: str) -> None:
    refused(sequential_url, "/v1/chat/completions", CHAT, 400, "has no chat template", "/v1/completions")


def test_a_seed_that_a_batch_cannot_keep() -> None:
    with running(new_served(continuous_batching=True)) as url:
        refused(url, "/v1/completions", {**COMPLETION, "seed": 1}, 400, "With continuous batching a seed needs")
        assert post(url, "/v1/completions", json.dumps({**COMPLETION, "seed": 1, "temperature": 0}).encode())[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"[1]", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_request(sequential_url: str, body: bytes) -> None:
    code, answer = post(sequential_url, "/v1/completions", body)
    assert code == 400
    assert answer["error"]["message"].startswith("The request: ")


STRANGE = [
    *(None, True, 0, -1, 2.5, 10**400, -(10**400), math.nan, math.inf, "", "tiny", "\ud800", "a" * 5000),
    *([], [[]], [1, "a"], [[1], [10**400]], [10**400], ["\ud800"], [None], [{}], {}, {"include_usage": 2}),
    [{"role": "a", "content": [{"type": "text", "text": ["a"]}]}],
]


@pytest.mark.parametrize(
    ("path", "right", "kind"),
    [("/v1/completions", COMPLETION, CompletionRequest), ("/v1/chat/completions", CHAT, ChatRequest)],
)
def test_no_value_of_any_field_is_the_servers_fault(chat_url: str, path: str, right: Any, kind: Any) -> None:
    """There is an answer, or 4xx with a sentence."""
    bodies = [{**right, field: value} for field in (*kind.model_fields, *NEUTRAL) for value in STRANGE]
    bodies += [{**right, field: 1} for field in ("", "\ud800", "a" * 100_000)]
    for body in bodies:
        code, answer = post(chat_url, path, json.dumps(body).encode())
        assert code < 500, (body, answer)
        if code != 200:
            assert answer["error"]["message"].endswith((".", "?"))
            assert len(answer["error"]["message"]) < 500


def test_a_body_that_is_too_large(sequential_url: str) -> None:
    refused(sequential_url, "/v1/completions", {"prompt": "a" * (16 << 20)}, 413, "at most 16 MiB")


def test_a_body_of_another_kind(sequential_url: str) -> None:
    """What curl sends without -H."""
    code, answer = post(sequential_url, "/v1/completions", b"{}", Content_Type="application/x-www-form-urlencoded")
    assert (code, answer["error"]["message"][:12]) == (415, "The content ")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/engines", 404), ("GET", "/v1/completions", 405)])
def test_an_unknown_route(sequential_url: str, method: str, path: str, status: int) -> None:
    code, answer = answer_to(urllib.request.Request(sequential_url.removesuffix("/v1") + path, method=method))
    assert (code, answer["error"]["message"]) == (status, f"{method} {path} is not served.")


def test_an_unknown_model(sequential: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        sequential.models.retrieve("gpt-5")


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
        with pytest.raises(openai.AuthenticationError, match="needs its API key"):
            client.completions.create(**COMPLETION)
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_nor_who_has_none(guarded_url: str) -> None:
    assert post(guarded_url, "/v1/completions", b"{")[0] == 401
    assert post(guarded_url, "/v1/completions", b"{", Authorization="Basic secret")[0] == 401
    assert answer_to(urllib.request.Request(guarded_url.removesuffix("/v1") + "/health")) == (200, {"status": "ok"})
