"""Which of a machine's addresses others reach it at, and where it can listen."""

from __future__ import annotations

import errno
import socket


def address_toward(peer: str) -> str:
    """Return the address of this machine that packets to `peer`, a name or an address, leave from; nothing is sent.

    Raises OSError without a route, or when no such name is known.
    """
    family, *_, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_own(address: str) -> bool:
    """Return whether this machine has an IP address. Raises OSError when that cannot be tried."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def is_free(address: str, port: int) -> bool:
    """Return whether no program listens on a port. Raises OSError when the address is not of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier job may linger
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def own_address(wanted: str | None, peer: str) -> str:
    """`wanted` if it is one of this machine's addresses, else the one toward `peer`."""
    return wanted if wanted is not None and is_own(wanted) else address_toward(peer)
