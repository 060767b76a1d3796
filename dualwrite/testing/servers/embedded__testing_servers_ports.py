"""TCP ports on the loopback interface, reserved while we hold them."""

from __future__ import annotations

import socket
import sys

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A free port that stays ours, even while the server that listens on it is killed and restarted.

    On Linux a bound socket that does not listen keeps the kernel from giving the port to a process that asks for any
    free one, yet a server may listen on it by number (with SO_REUSEADDR, as servers do). Other systems would refuse
    that server, so there the port is not held: it was free a moment ago.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]
        if not sys.platform.startswith("linux"):
            self._socket.close()

    def release(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def accepts_connections(port: int) -> bool:
    """Whether a server listens on this port of the loopback interface."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0):
            return True
    except OSError:
        return False
