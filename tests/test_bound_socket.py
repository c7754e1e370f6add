"""The sockets of the servers, which have their address before any model is loaded."""

import socket
import urllib.parse

import pytest

from diff_transformer.utils.servers import bound_socket, root_url


def test_a_socket_is_of_this_machine_alone_and_has_a_free_port() -> None:
    with bound_socket("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        assert (host, port > 0) == ("127.0.0.1", True)
        assert root_url("localhost", bound) == f"http://localhost:{port}"
        bound.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass
        with pytest.raises(OSError, match=f"Cannot listen on 127.0.0.1, port {port}: Address already in use"):
            bound_socket("127.0.0.1", port)


def test_an_address_of_the_sixth_version_stands_in_brackets() -> None:
    try:
        bound = bound_socket("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with bound:
        url = urllib.parse.urlsplit(root_url("::1", bound))
        assert (url.hostname, url.port) == ("::1", bound.getsockname()[1])


def test_a_host_of_another_machine_is_refused_with_a_sentence() -> None:
    with pytest.raises(OSError, match=r"Cannot listen on 192\.0\.2\.1, port 80: "):
        bound_socket("192.0.2.1", 80)
