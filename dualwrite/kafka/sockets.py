"""Sockets for kafka-python: of the configured address family, closed when they fail to connect, and read to the end.

kafka-python chooses its socket factory by the scheme of a proxy's address.
"""

from __future__ import annotations

import socket
import ssl
from socket import socket as Socket  # noqa: N812 - a method below must be called socket
from typing import Any, Final

from kafka.net.inet import KafkaNetSocket

_FAMILIES: Final = {"any": socket.AF_UNSPEC, "v4": socket.AF_INET, "v6": socket.AF_INET6}
FAMILIES: Final = tuple(_FAMILIES)
"""librdkafka's values for ``broker.address.family``."""


class _ReadToTheEnd(Socket):
    """Reports the peer's close only on the next read.

    kafka-python discards the data that it has just read if the end of the stream follows at once. A broker that refuses
    a login says why and closes, so the reason would be lost and the login retried forever.
    """

    _has_read = False

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data = super().recv(buflen, flags)
        if not data and self._has_read:
            self._has_read = False
            raise BlockingIOError
        self._has_read = bool(data)
        return data

    def __del__(self) -> None:
        # The last resort: the closing of a network closes the sockets that its loop waits for, not one that an interruption of
        # the caller's thread hits before the loop knows it, nor any if it hits the closing, or if nobody closes the network.
        if self.fileno() >= 0:
            self.close()


class TlsSocket(_ReadToTheEnd, ssl.SSLSocket):
    """A TLS socket, closed if the handshake fails, and read to the end; see ``ssl.SSLContext.sslsocket_class``."""

    def do_handshake(self, block: bool = False) -> None:  # noqa: FBT001, FBT002 - the signature of the standard library
        """Perform the TLS handshake; close the socket if it fails."""
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except BaseException:
            self.close()
            raise


class PlainSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types
    """Makes sockets that connect directly, without a proxy.

    Args:
        proxy_url: The result of `address_of`.
    """

    SCHEMES: Final = tuple(f"dualwrite-{family}" for family in FAMILIES)

    def __init__(self, proxy_url: str) -> None:
        self._family = _FAMILIES[proxy_url.removeprefix("dualwrite-").removesuffix("://")]

    def dns_lookup(self, host: str, port: int, raise_error: bool = False) -> list[tuple[Any, ...]]:  # noqa: FBT001, FBT002 - kafka-python's signature
        """The addresses of a broker that belong to the family."""
        found = super().dns_lookup(host, port, raise_error)
        return [address for address in found if self._family in {socket.AF_UNSPEC, address[0]}]

    def socket(self, family: int, sock_type: int, proto: int) -> Socket:
        """Make a socket that is read to the end."""
        return _ReadToTheEnd(family, sock_type, proto)

    async def sock_connect(self, net: object, sock: Socket, sockaddr: object, timeout_at: float | None = None) -> Any:
        """Connect; close the socket if that fails."""
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise


def address_of(family: str) -> str:
    """The ``proxy_url`` that makes kafka-python connect directly, in this address family."""
    return f"dualwrite-{family}://"
