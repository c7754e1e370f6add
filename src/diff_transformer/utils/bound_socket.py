"""Takes an address of this machine for a server before it loads its models: a taken port is said at once."""

import ipaddress
import socket


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
