"""A judge behind an address: replies that are right, malformed, slow or missing, and a key that nobody sees."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.measure import hallucination
from diff_lab.measure.hallucination import EndpointJudge, JudgeOptions, evidence, read_verdict
from diff_lab.measure.question_files import Source
from judge_server import JudgeServer, Reply, fails, judge_server, says

KEY = "sk-a-very-secret-key"
SOURCE = Source(document="It rains in Bergen.", question="Where does it rain?", reference="Bergen")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server() as running:
        yield running


def a_judge(url: str, *, retries: int = 0, **options: Any) -> EndpointJudge:
    settings = {"model": "a-judge", **options}
    return EndpointJudge(JudgeOptions(judge=url, **{f"judge_{name}": settings[name] for name in settings}), retries)


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("It does.\nVERDICT: SUPPORTED", True),
        ("It does not.\n\nVERDICT: UNSUPPORTED\n", False),
        ("reason\n```\nVERDICT: UNSUPPORTED\n```", False),
        ("unsupported", False),
        ("VERDICT: SUPPORTED\nbut then again", None),
        ("VERDICT: NOT SUPPORTED", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_last_line_and_nothing_else(reply: str, verdict: bool | None) -> None:
    assert read_verdict(reply) is verdict


def test_what_is_asked_and_what_comes_back(server: JudgeServer) -> None:
    server.replies = [says("No.\nVERDICT: UNSUPPORTED"), says("Hm.")]
    judge = a_judge(server.url, body={"max_tokens": None, "max_completion_tokens": 50})
    judgement = judge.judge(SOURCE, "It rains in Oslo.")
    assert (judgement.supported, judgement.reply) == (False, "No.\nVERDICT: UNSUPPORTED")
    assert server.paths == ["/v1/chat/completions"]
    (request,) = server.requests
    assert request.keys() == {"model", "messages", "temperature", "max_completion_tokens"}
    assert (request["model"], request["temperature"], request["max_completion_tokens"]) == ("a-judge", 0, 50)
    system, user = request["messages"]
    assert "VERDICT: UNSUPPORTED" in system["content"]
    assert user["content"] == evidence(SOURCE, "It rains in Oslo.")
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    # A reply without a verdict is a judgement that cannot be read; it is not asked for again.
    assert judge.judge(SOURCE, "x").supported is None
    assert len(server.requests) == 2
    a_judge(server.url, key="").judge(SOURCE, "x")
    assert "Authorization" not in server.headers[2]


@pytest.mark.parametrize("reply", [fails(429), Reply(status=503, body=b"<html>down</html>")])
def test_a_server_that_is_overloaded_is_asked_again(server: JudgeServer, reply: Reply) -> None:
    reply = replace(reply, headers={"Retry-After": "0.01"})
    server.replies = [reply] * 2
    assert a_judge(server.url, retries=2).judge(SOURCE, "x").supported is True
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b'{"choices": []}', says(["VERDICT: SUPPORTED"]).body, b"[" * 100_000],
    ids=["no JSON", "no choices", "no text", "too deep"],
)
def test_what_is_no_chat_completion_is_an_error(server: JudgeServer, body: bytes) -> None:
    server.replies = [Reply(body=body, headers={"Content-Type": "application/json"})]
    with pytest.raises(OSError, match=r"^The judge at http://127.0.0.1:\d+/v1 failed: "):
        a_judge(server.url).judge(SOURCE, "x")


def test_slow_replies_end(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.replies = [replace(says("VERDICT: SUPPORTED"), wait=5)]
    monkeypatch.setattr(hallucination, "SECONDS", 0.4)
    with pytest.raises(OSError, match=r"failed: Request timed out"):
        a_judge(server.url).judge(SOURCE, "x")


def test_a_refusal_is_final(server: JudgeServer) -> None:
    server.replies = [fails(401, f"Bearer {KEY} is\nnot welcome")]
    with pytest.raises(OSError, match=r"failed: .*401.*Bearer \[key\] is"):
        a_judge(server.url, retries=5).judge(SOURCE, "x")
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed_with_the_key(server: JudgeServer) -> None:
    with judge_server() as other:
        server.replies = [Reply(status=307, headers={"Location": f"{other.url}/chat/completions"})]
        with pytest.raises(OSError, match="failed: "):
            a_judge(server.url).judge(SOURCE, "x")
        assert other.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_no_proxy_is_asked_for_an_address_of_this_machine(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """It would read the documents and the key."""
    port = server.url.split(":")[-1].removesuffix("/v1")
    with judge_server() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        with contextlib.suppress(OSError):  # the server listens at the first two alone
            a_judge(f"http://{host}:{port}/v1").judge(SOURCE, "x")
        assert proxy.requests == []
    assert len(server.requests) == (host in ("127.0.0.1", "localhost"))


def test_the_key_is_nowhere(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    server.replies = [says(f"{KEY}\nVERDICT: SUPPORTED"), fails(500, KEY)]
    judge = a_judge(server.url)
    shown = [repr(judge), judge.name, repr(judge.judge(SOURCE, "x"))]
    with pytest.raises(OSError, match="failed: ") as caught:
        judge.judge(SOURCE, "x")
    out, err = capfd.readouterr()
    cause = caught.value.__cause__
    for text in (*shown, str(caught.value), repr(cause), caplog.text, out, err):
        assert KEY not in text
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"


def test_settings_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD", KEY)
    monkeypatch.setenv("BAD", f"{KEY}\u2028x")
    monkeypatch.delenv("NONE", raising=False)
    for url in ("ftp://x", "http://"):
        with pytest.raises(ValueError, match="A judge is 'words' or an address with"):
            a_judge(url, key="GOOD")
    for url in ("https://me:pw@host/v1", "https://host/v1?key=1"):
        with pytest.raises(ValueError, match="neither a password nor a query"):
            a_judge(url, key="GOOD")
    for variable in ("NONE", "BAD"):
        with pytest.raises(ValueError, match=f"'{variable}', which holds the judge's key, is not set or") as caught:
            a_judge("http://x", key=variable)
        assert KEY not in str(caught.value)
    with pytest.raises(ValueError, match="the given text is no name of one") as caught:
        a_judge("http://x", key=KEY)
    assert KEY not in str(caught.value)
    with pytest.raises(ValueError, match="needs a model's name"):
        a_judge("http://x", model=" ", key="GOOD")
