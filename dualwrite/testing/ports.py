"""TCP ports on the loopback interface that nobody else is given while we hold them."""

from __future__ import annotations

import socket
import sys

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A free port that stays ours, also while the server that listens on it is killed and started again.

    On Linux a socket that is bound but does not listen keeps the kernel from giving the port to anybody who asks for
    a free one, yet lets a server listen on it that asks for it by number (with SO_REUSEADDR, as servers do).
    Elsewhere that server would be refused, so there the port is only known to have been free a moment ago.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]
        if not sys.platform.startswith("linux"):
            self._socket.close()

    def release(self) -> None:
        """Let the port go. May be called again."""
        self._socket.close()


def accepts_connections(port: int) -> bool:
    """Whether a server listens on this port of the loopback interface."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0):
            return True
    except OSError:
        return False
