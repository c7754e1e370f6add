"""Serves the page and answers its questions on this machine alone, to who knows the token in the address."""

import asyncio
import secrets
import socket
import traceback
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from diff_transformer.explorer.explorer import Explorer
from diff_transformer.explorer.page import page_html
from diff_transformer.utils.files import parse_json
from diff_transformer.utils.servers import root_url

LARGEST_QUESTION = 2_000_000  # bytes
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),  # beside the page's own
    ("Referrer-Policy", "no-referrer"),  # the address has the token in it
    ("X-Content-Type-Options", "nosniff"),
]


def make_app(
    explorers: Mapping[str, Explorer], token: str, thread: Executor, hosts: tuple[str, ...] | None = _LOOPBACK
) -> Starlette:
    """Make the server's application.

    Args:
        explorers: the explorer by the name in the address of its page. Each page links to the others.
        token: the beginning of the address; any other address is answered as one that does not exist.
        thread: the one thread that computes (`diff_transformer.utils.servers` says why).
        hosts: names that the browser may call this server by; None for any. A page of somebody else, whose name is
            made to lead here, uses its own.
    """
    pairs = [{"name": name, "address": _path(token, name)} for name in explorers]

    def check(request: Request) -> None:
        host = request.headers.get("host", "").rpartition("@")[2]
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        given = request.path_params["token"]
        is_ours = hosts is None or name.strip("[]") in hosts
        if not is_ours or not secrets.compare_digest(given.encode(), token.encode()):
            raise HTTPException(404)

    def routes(name: str, explorer: Explorer) -> list[Route]:
        data = {"mode": "server", "pairs": pairs, **explorer.describe()}
        page = page_html(data, title="Attention explorer", may_ask=True)

        async def show(request: Request) -> Response:
            check(request)
            return HTMLResponse(page)

        async def answer(request: Request) -> Response:
            check(request)
            ask = explorer.questions.get(request.path_params["question"])
            if ask is None:
                raise HTTPException(404)
            try:
                question = parse_json(await _body(request), "The question")
                found = await asyncio.get_running_loop().run_in_executor(thread, ask, question)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            except (ClientDisconnect, asyncio.CancelledError):  # nobody waits: it has gone, or the server ends
                return Response(status_code=503)
            except Exception:
                traceback.print_exc()
                message = "The explorer failed at this; the terminal that it was started from shows why."
                return JSONResponse({"error": message}, status_code=500)
            is_map = isinstance(found, bytes)
            return Response(found, media_type="application/octet-stream") if is_map else JSONResponse(found)

        path = _path("{token}", name)
        return [Route(path, show, methods=["GET"]), Route(f"{path}api/{{question}}", answer, methods=["POST"])]

    async def refuse(request: Request, error: Any) -> Response:
        return JSONResponse({"error": "There is nothing at this address."}, status_code=error.status_code)

    return Starlette(
        routes=[route for name, explorer in explorers.items() for route in routes(name, explorer)],
        exception_handlers={HTTPException: refuse},
    )


def _path(token: str, name: str) -> str:
    return f"/{token}/{name}/" if name else f"/{token}/"


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_QUESTION:
            raise ValueError(f"A question has {LARGEST_QUESTION:,} bytes at most.")
    return body


class ExplorerServer:
    """A server that listens from the moment it is made.

    Args:
        explorers: the explorer by the name in the address of its page, which may be empty. The first is opened.
        bound: the socket to listen on, which `bound_socket` has bound to `host`. :meth:`serve` closes it.
        host: with any but "127.0.0.1" and other names of this machine alone, others may ask.

    Attributes:
        address: of the page, with the token.
    """

    def __init__(self, explorers: Mapping[str, Explorer], bound: socket.socket, host: str = "127.0.0.1") -> None:
        token = secrets.token_urlsafe(16)
        self._socket = bound
        self._socket.listen()
        self.port: int = bound.getsockname()[1]
        self.address = f"{root_url(host, bound)}{_path(token, next(iter(explorers)))}"
        self._thread = ThreadPoolExecutor(1, "explorer")
        # Whoever listens to others has told them a name or an address of this machine that is not known here.
        app = make_app(explorers, token, self._thread, _LOOPBACK if host in _LOOPBACK else None)
        settings: dict[str, Any] = {"access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 1}
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", headers=_HEADERS, **settings))

    def serve(self) -> None:
        """Answer until Ctrl-C, SIGTERM or :meth:`stop`. In the main thread Ctrl-C ends in a KeyboardInterrupt."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """End :meth:`serve`, which another thread is in."""
        self._server.should_exit = True
