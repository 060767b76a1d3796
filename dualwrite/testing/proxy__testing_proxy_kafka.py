"""A proxy that understands the frames and headers of Kafka's requests."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dualwrite.testing.proxy__testing_proxy_rules import Choice
from dualwrite.testing.proxy__testing_proxy_tcp import Proxy
from dualwrite.testing.proxy__testing_proxy_units import Answer, Unit
from dualwrite.testing.servers.embedded__testing_servers_ports import LOOPBACK

if TYPE_CHECKING:
    import asyncio

    from dualwrite.testing.servers.kafka import EmbeddedKafka


class Api(enum.IntEnum):
    """API keys of Kafka's protocol; you may use other numbers too."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66


@dataclass(frozen=True)
class KafkaRequest:
    """The header of one request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


class KafkaCodec:
    """Length-prefixed frames; requests and answers share a correlation id."""

    def __init__(self) -> None:
        self._copies = 0

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:  # noqa: ARG002 - see Codec
        """Nothing: a client begins with a request."""
        return b""

    async def next_request(self, client: asyncio.StreamReader) -> Unit[KafkaRequest]:
        """The next frame from the client."""
        frame = await _frame(client)
        api_key, api_version, correlation_id, length = struct.unpack_from(">hhih", frame, 4)
        client_id = None if length < 0 else frame[14 : 14 + length].decode()
        return Unit(KafkaRequest(api_key, api_version, correlation_id, client_id), frame, correlation_id)

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        """The next frame from the broker."""
        frame = await _frame(server)
        (correlation_id,) = struct.unpack_from(">i", frame, 4)
        return Answer(correlation_id, frame, final=True)

    def copy_of(self, unit: Unit[KafkaRequest]) -> Unit[KafkaRequest]:
        """The same frame with a correlation id that no client uses."""
        self._copies += 1
        correlation_id = -1 - self._copies
        return Unit(unit.request, unit.data[:8] + struct.pack(">i", correlation_id) + unit.data[12:], correlation_id)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    length = await reader.readexactly(4)
    return length + await reader.readexactly(int.from_bytes(length, "big", signed=True))


class KafkaProxy(Proxy[KafkaRequest]):
    """A proxy in front of an embedded broker, which supports as many at a time as its ``proxies`` argument says.

    The broker directs clients that come through the proxy to the proxy's address only. Clients with the broker's own
    ``client_config`` bypass it, and so does the broker when it talks to itself.

    Example::

        with KafkaProxy(kafka) as proxy:
            held = proxy.on(Api.END_TXN).hold_request()
            ...  # a client made from proxy.client_config() commits
            held.wait()
            held.release()

    Args:
        kafka: A started broker.
        number: The number of the broker's proxy, from 0.
        broker: The id of the broker. The cluster's other brokers direct clients to their own proxies of this number.
    """

    def __init__(self, kafka: EmbeddedKafka, *, number: int = 0, broker: int = 1) -> None:
        proxied, proxy = kafka.proxy_ports(number, broker=broker)
        super().__init__(proxied, KafkaCodec, port=proxy)
        self._kafka = kafka

    def client_config(self, user: str | None = None) -> dict[str, str]:
        """As `EmbeddedKafka.client_config`, but through the proxy."""
        return {**self._kafka.client_config(user), "bootstrap.servers": f"{LOOPBACK}:{self.port}"}

    def on(
        self,
        api_key: int | None = None,
        *,
        nth: int | None = 1,
        client_id: str | None = None,
        containing: bytes | None = None,
    ) -> Choice[KafkaRequest]:
        """Choose requests. Call a method of the choice to make a rule, which counts requests from then on.

        Args:
            api_key: The kind of request, see `Api`; any if None.
            nth: The number of the matching request to take, from 1; all if None.
            client_id: Only requests of clients with this ``client.id``.
            containing: Only requests that contain these bytes, such as a transactional id or a topic.
        """

        def matches(unit: Unit[KafkaRequest]) -> bool:
            assert unit.request is not None
            return (
                (api_key is None or unit.request.api_key == api_key)
                and (client_id is None or unit.request.client_id == client_id)
                and (containing is None or containing in unit.data)
            )

        return Choice(partial(self._add, matches=matches, nth=nth))
