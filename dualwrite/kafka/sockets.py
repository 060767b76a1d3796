"""How kafka-python's connections get their sockets: from the address family asked for, and closed when they fail.

kafka-python picks the maker of its sockets by the scheme of a proxy's address, and leaves a socket open that could not connect.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from kafka.net.inet import KafkaNetSocket

_FAMILIES: Final = {"any": socket.AF_UNSPEC, "v4": socket.AF_INET, "v6": socket.AF_INET6}
FAMILIES: Final = tuple(_FAMILIES)
"""librdkafka's values of ``broker.address.family``."""


class PlainSocket(KafkaNetSocket):  # type: ignore[misc] # kafka-python has no types
    """Makes sockets that connect directly, without a proxy.

    Args:
        proxy_url: What `address_of` gives.
    """

    SCHEMES: Final = tuple(f"dualwrite-{family}" for family in FAMILIES)

    def __init__(self, proxy_url: str) -> None:
        self._family = _FAMILIES[proxy_url.removeprefix("dualwrite-").removesuffix("://")]

    def dns_lookup(self, host: str, port: int, raise_error: bool = False) -> list[tuple[Any, ...]]:  # noqa: FBT001, FBT002 - kafka-python's signature
        """The addresses of a broker, those of the family."""
        found = super().dns_lookup(host, port, raise_error)
        return [address for address in found if self._family in {socket.AF_UNSPEC, address[0]}]

    async def sock_connect(
        self, net: object, sock: socket.socket, sockaddr: object, timeout_at: float | None = None
    ) -> Any:
        """Connect, or close the socket."""
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise


def address_of(family: str) -> str:
    """kafka-python's ``proxy_url`` that means no proxy, and this address family."""
    return f"dualwrite-{family}://"
