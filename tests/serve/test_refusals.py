"""Wrong requests get a 4xx with one sentence, never a 500; and who has no key gets nothing."""

import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from starlette.exceptions import HTTPException

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


def refused(url: str, path: str, body: Any, status: int, part: str) -> None:
    """The answer has the status and one sentence with the part."""
    code, answer = post(url, path, json.dumps(body).encode())
    message = answer["error"]["message"]
    assert code == status, message
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "prompt: Field required."),
        ({"prompt": ["a", 7]}, "got 7"),
        ({"prompt": ["a"] * 1025}, "at most 1024 items"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": [[1], [257]]}, "Tokens must lie in 0 … 256, got 257"),
        ({"max_tokens": 92}, "context of 96 tokens cannot hold the prompt's 5 and 92 new ones"),
        ({"prompt": "a" * 100_000}, "context of 96 tokens cannot hold 100,000 characters."),
        ({"max_tokens": True}, "max_tokens: Input should be a valid integer, got True."),
        ({"model": "other"}, "The model 'other' is not here; this server has 'tiny'."),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2, got 3."),
        ({"stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
        ({"stream": True, "prompt": ["a", "b"]}, "A stream takes one prompt and has no logprobs"),
        ({"n": 2}, "n must be 1 or left out, got 2."),
        ({"max_token": 3}, "The field 'max_token' is not known here; did you mean 'max_tokens'?"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content: Input should be"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "The chat template refuses the messages: no robots"),
        ({**CHAT, "max_completion_tokens": 3}, "Give max_completion_tokens or max_tokens, not both"),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools must be [] or left out"),
    ],
    ids=str,
)
def test_a_wrong_request(chat_url: str, changes: dict[str, Any], message: str) -> None:
    path, right = ("/v1/chat/completions", CHAT) if "messages" in changes else ("/v1/completions", COMPLETION)
    refused(chat_url, path, {**right, **changes}, 404 if "model" in changes and len(changes) == 1 else 400, message)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content + 1 }}", 'refuses the messages: can only concatenate str (not "int") to str.'),
        ({"rag": "a", "tool_use": "b"}, "multiple chat templates with no default specified"),
        ("", "has no chat template"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_fails(template: Any, message: str) -> None:
    served = new_served(chat=True)
    served.tokenizer.chat_template = template
    with pytest.raises(HTTPException) as refusal:
        served.prepare(ChatRequest(**CHAT))
    assert refusal.value.status_code == 400
    assert message in refusal.value.detail
    assert refusal.value.detail.endswith(".")


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


def test_whoever_has_the_key_is_answered_and_nobody_else() -> None:
    with running(new_served(), api_key="secret") as url:
        with client_of(url, "secret") as client:
            assert client.completions.create(**COMPLETION).choices
            assert [model.id for model in client.models.list()] == ["tiny"]
        for key in ("Secret", "secret2", "s"):
            with client_of(url, key) as client:
                with pytest.raises(openai.AuthenticationError, match="needs its API key"):
                    client.completions.create(**COMPLETION)
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
        assert post(url, "/v1/completions", b"{")[0] == 401
        assert post(url, "/v1/completions", b"{", Authorization="Basic secret")[0] == 401
        assert answer_to(urllib.request.Request(url.removesuffix("/v1") + "/health")) == (200, {"status": "ok"})


def test_a_client_that_hangs_up_inside_its_body(chat_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is no fault of the server, whose log has no traceback of it."""
    address = urlsplit(chat_url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        client.sendall(head.encode())
        time.sleep(0.1)
    assert post(chat_url, "/v1/completions", json.dumps(COMPLETION).encode())[0] == 200
    assert not [record for record in caplog.records if record.exc_info]
