"""The server: what it answers, to whom, and what it refuses."""

import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from decoded_maps import decode_maps
from diff_transformer.explorer import ExploredModel, Explorer, Side, WordVocabulary
from diff_transformer.explorer.server import LARGEST_QUESTION, ExplorerServer
from diff_transformer.utils.servers import bound_socket
from explored_models import TEXT, make, serving


@pytest.fixture(scope="module")
def server(explorer: Explorer) -> Iterator[ExplorerServer]:
    with serving(explorer) as server:
        yield server


def request(address: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    """The status, the body and the headers of the answer."""
    asked = urllib.request.Request(address, data=body, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def ask(server: ExplorerServer, name: str, question: Any) -> tuple[int, Any]:
    status, body, _ = request(f"{server.address}api/{name}", json.dumps(question).encode())
    return status, json.loads(body)


def test_one_thread_computes_for_all_questions(explorer: Explorer) -> None:
    """A second one would slow down the first: utils/servers.py."""
    computing: set[threading.Thread] = set()
    note = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda *_: computing.add(threading.current_thread())
    )
    with note, serving(explorer) as server:
        questions = [{"text": f"w{number} w3"} for number in range(6)]
        asking = [threading.Thread(target=ask, args=(server, "run", question)) for question in questions]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
    assert len(computing) == 1
    computing.pop().join(10)  # it ends with the server


def test_the_page_and_its_questions(server: ExplorerServer, explorer: Explorer) -> None:
    status, page, headers = request(server.address)
    assert status == 200
    assert headers.get_content_type() == "text/html"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert b"tiny-diff" in page
    assert ask(server, "run", {"text": TEXT}) == (200, explorer.run({"text": TEXT}))
    assert ask(server, "next", {"text": TEXT, "side": "right"})[0] == 200
    assert ask(server, "example", {"seed": 3})[1]["title"] == "example 3"
    status, body, headers = request(
        f"{server.address}api/map", json.dumps({"text": TEXT, "layer": 1, "head": 1}).encode()
    )
    assert (status, headers.get_content_type()) == (200, "application/octet-stream")
    assert decode_maps(body)[0].first.shape == (1, 11, 11)


def test_several_pairs_of_models_have_a_page_each(explorer: Explorer) -> None:
    """Under the same token; each page has the addresses of all."""
    other = Explorer(Side(ExploredModel(make("diff_v2"), "tiny-v2"), explorer.sides["left"].vocabulary))
    with serving({"first": explorer, "second": other}) as server:
        assert server.address.endswith("/first/")
        second = server.address.replace("/first/", "/second/")
        for address, name in ((server.address, b"tiny-diff"), (second, b"tiny-v2")):
            status, page, _ = request(address)
            assert (status, name in page) == (200, True)
            data = json.loads(re.findall(rb'id="explorer-data">(.*?)</script>', page)[0])
            root = f"http://127.0.0.1:{server.port}"
            assert [root + pair["address"] for pair in data["pairs"]] == [server.address, second]
        losses = [json.loads(request(f"{address}api/run", json.dumps({"text": TEXT}).encode())[1])["loss"]
                  for address in (server.address, second)]  # fmt: skip
        assert losses == [explorer.run({"text": TEXT})["loss"], other.run({"text": TEXT})["loss"]]
        for address in (second.replace("second", "third"), second.replace("/second", "")):
            assert request(address)[0] == 404


def test_only_the_address_with_the_token_exists(server: ExplorerServer) -> None:
    root = f"http://127.0.0.1:{server.port}"
    token = server.address.removeprefix(root).strip("/")
    assert len(token) >= 20
    wrong = [
        "/",
        f"/{token[:-1]}/",
        f"/{token}x/",
        "/%C3%A9/",
        f"/{token}/%2e%2e/%2e%2e/etc/passwd",
        f"/{token}/model.safetensors",
        "/favicon.ico",
        "/openapi.json",
    ]
    for path in wrong:
        status, body, _ = request(root + path)
        assert (path, status) == (path, 404)
        assert json.loads(body) == {"error": "There is nothing at this address."}
    assert request(f"{root}/wrong/api/run", b"{}")[0] == 404
    assert request(f"{server.address}api/__init__", b"{}")[0] == 404
    assert request(f"{server.address}api/run")[0] == 405  # a link to it does nothing


def test_a_page_of_somebody_else_gets_nothing(server: ExplorerServer) -> None:
    """One whose own name was made to lead to this machine, and one that asks from elsewhere."""
    assert request(server.address, Host=f"evil.example:{server.port}")[0] == 404
    assert request(server.address, Host="127.0.0.1.evil.example")[0] == 404
    assert request(server.address.replace("127.0.0.1", "localhost"))[0] == 200
    _, _, headers = request(server.address, Origin="http://evil.example")
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xfe{", "is not UTF-8"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b'{"text": "w3 \\ud800"}', "surrogate pair"),
        (b'{"text": "' + b"w3 " * (LARGEST_QUESTION // 3) + b'"}', "2,000,000 bytes at most"),
        (b'{"text": "' + b"w3 " * 340_000 + b'"}', "340,000 tokens"),
        (b'{"tokens": [1e400]}', "numbers in 0"),
    ],
)
def test_hostile_questions_get_a_sentence(server: ExplorerServer, body: bytes, message: str) -> None:
    for name in ("run", "map", "next"):
        status, answer, _ = request(f"{server.address}api/{name}", body)
        assert status == 400
        assert message in json.loads(answer)["error"]
    assert ask(server, "run", {"text": TEXT})[0] == 200


def test_a_bug_is_told_without_its_details(explorer: Explorer, capfd: Any) -> None:
    class Broken(WordVocabulary):
        def encode(self, text: str) -> Any:
            return {}["secret"]

    with serving(Explorer(Side(explorer.sides["left"].model, Broken(["a"] * 29)))) as server:
        status, answer = ask(server, "run", {"text": TEXT})
    assert status == 500
    assert "secret" not in answer["error"]
    assert "KeyError: 'secret'" in capfd.readouterr().err


def test_other_machines_reach_it_by_any_name_where_that_is_asked_for(explorer: Explorer) -> None:
    with serving(explorer, host="0.0.0.0") as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        assert request(address, Host="workstation.local")[0] == 200
        assert request(f"http://127.0.0.1:{server.port}/", Host="workstation.local")[0] == 404


def test_every_server_has_its_own_token_and_listens_from_the_moment_it_is_made(explorer: Explorer) -> None:
    tokens = set()
    for _ in range(2):
        with bound_socket("127.0.0.1", 0) as bound:
            server = ExplorerServer({"": explorer}, bound)
            tokens.add(server.address.rstrip("/").rpartition("/")[2])
            with socket.create_connection(("127.0.0.1", server.port), timeout=10):
                pass
    assert len(tokens) == 2
