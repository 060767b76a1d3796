"""A TCP relay that a test can cut, and lead elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading

from dualwrite.testing.servers.embedded import LOOPBACK


class Relay:
    """Passes TCP connections on to one port of this machine, until it is cut.

    Args:
        port: The port.
    """

    def __init__(self, port: int) -> None:
        self._target = (LOOPBACK, port)
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._is_cut = False
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and each new one."""
        with self._lock:
            self._is_cut = True
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def join(self, port: int | None = None) -> None:
        """Pass connections on again, to another port if one is given."""
        with self._lock:
            self._is_cut = False
            if port is not None:
                self._target = (LOOPBACK, port)

    def close(self) -> None:
        """Stop listening, and break all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(self._target)
            except OSError:
                return
            with far:
                with self._lock:
                    if self._is_cut:
                        return
                    self._open |= {near, far}
                back = threading.Thread(target=_pump, args=(far, near), daemon=True)
                back.start()
                _pump(near, far)
                back.join()
                with self._lock:
                    self._open -= {near, far}


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
