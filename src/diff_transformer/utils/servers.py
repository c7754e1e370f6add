"""Helps servers: takes an address before models are loaded, and lets models compute in threads that end.

A thread that has computed slows down every other one (docs/serving.md says how much): its OpenMP helpers spin while
they wait for its next operation, and where those of two threads are more than the cores they sleep instead. They end
with their thread. So a server loads its models in a short-lived thread, and one thread computes for all questions.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that has its address already and listens when the server starts; port 0 is any free one.

    Raises:
        OSError: the port is taken, or the host is none of this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(f"Cannot listen on {host}, port {port}: {error.strerror or error}.") from None
    return bound


def root_url(host: str, bound: socket.socket) -> str:
    """Return the URL, without a path, of a server that was asked to listen on `host`."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"


def in_short_lived_thread(work: Callable[[], T]) -> T:
    """Do the work in a new thread, wait until that has ended, and return its result or raise its error.

    Ctrl-C ends the waiting, and the thread with the program.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="short-lived", daemon=True)
    thread.start()
    thread.join()
    return outcome.result()
