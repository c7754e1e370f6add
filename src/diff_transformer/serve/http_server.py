"""Listens for requests until a signal comes."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from diff_transformer.listening import root_url
from diff_transformer.serve.served_model import ServedModel

# So long a signal waits for answers; texts that are being generated end at once.
SECONDS_TO_END = 10


class ServerInterrupted(KeyboardInterrupt):
    """A signal ended the server; `signal` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__("The server has stopped.")
        self.signal = number


def url_of(host: str, bound: socket.socket) -> str:
    """The URL that clients of OpenAI's API are given for a server that listens on `host`."""
    return f"{root_url(host, bound)}/v1"


class ModelServer(uvicorn.Server):
    """uvicorn's server, which says when it is ready, and ends what is being generated before it waits for answers."""

    def __init__(
        self, application: Any, served: ServedModel, ready: Callable[[], None], *, log_requests: bool = False
    ) -> None:
        logging_config = uvicorn.config.LOGGING_CONFIG if log_requests else None
        super().__init__(
            uvicorn.Config(
                application,
                lifespan="off",
                log_config=logging_config,
                access_log=log_requests,
                timeout_graceful_shutdown=SECONDS_TO_END,
            )
        )
        self._served, self._ready = served, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._served.engine.stop()
        await super().shutdown(sockets)
        await asyncio.to_thread(self._served.engine.close)


def run_server(server: ModelServer, bound: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    Raises:
        ServerInterrupted: the signal came, and all requests have ended.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise ServerInterrupted(number)

    # uvicorn has handlers of its own while it runs, and raises the signal again afterwards.
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[bound])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
