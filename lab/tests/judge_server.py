"""An OpenAI-compatible server on this machine, which answers as a script says."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server does with one request: the bytes it sends, after `wait` seconds."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0


def says(content: Any, **usage: int) -> Reply:
    """A chat completion."""
    completion: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": content}}]}
    if usage:
        completion["usage"] = usage
    return Reply(body=json.dumps(completion).encode())


def fails(status: int, message: str = "", **headers: str) -> Reply:
    """An error in OpenAI's form."""
    return Reply(status=status, body=json.dumps({"error": {"message": message}}).encode(), headers=headers)


class JudgeServer:
    """The address of a running server, the replies it still has to give, and what it was asked."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        """In this order; afterwards `rule` is asked."""
        self.rule: Any = lambda request: says("VERDICT: SUPPORTED")
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.url = ""

    def answer(self, path: str, headers: dict[str, str], data: bytes) -> Reply:
        self.paths.append(path)
        self.headers.append(headers)
        self.requests.append(json.loads(data))
        return self.replies.pop(0) if self.replies else self.rule(self.requests[-1])


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """Runs in a thread until the block ends."""
    server = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            reply = server.answer(self.path, {name.title(): value for name, value in self.headers.items()}, data)
            time.sleep(reply.wait)
            try:
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(reply.body)))
                for name, value in reply.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                self.wfile.write(reply.body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever asked has gone, which is what some tests are about

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
