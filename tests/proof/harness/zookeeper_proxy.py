"""A proxy that understands enough of ZooKeeper's protocol to recognise requests by their type."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from dualwrite.testing import EmbeddedZooKeeper
from dualwrite.testing.proxy import Answer, Choice, Proxy, Unit
from dualwrite.testing.servers.embedded import LOOPBACK

CREATE, GET, SYNC, MULTI = 1, 4, 9, 14
_OPENING = 0


@dataclass(frozen=True)
class ZooKeeperRequest:
    kind: int
    number: int


class ZooKeeperCodec:
    """Packets with a length. A request begins with its number and its type, an answer with the number."""

    def __init__(self) -> None:
        self._opened = False

    async def opening(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> bytes:
        del reply
        return await _packet(client)

    async def next_request(self, client: asyncio.StreamReader) -> Unit[ZooKeeperRequest]:
        data = await _packet(client)
        number, kind = _number(data, 4), _number(data, 8)
        return Unit(ZooKeeperRequest(kind, number) if number > 0 else None, data, number)

    async def next_answer(self, server: asyncio.StreamReader) -> Answer:
        data = await _packet(server)
        if not self._opened:
            self._opened = True
            return Answer(_OPENING, data, final=True)
        return Answer(_number(data, 4), data, final=True)

    def copy_of(self, unit: Unit[ZooKeeperRequest]) -> Unit[ZooKeeperRequest]:
        raise NotImplementedError(f"a session sends no request twice: {unit.request}")


class ZooKeeperProxy(Proxy[ZooKeeperRequest]):
    """A proxy in front of one server."""

    def __init__(self, zookeeper: EmbeddedZooKeeper, server: int = 1) -> None:
        super().__init__(int(zookeeper.host(server).rpartition(":")[2]), ZooKeeperCodec)

    @property
    def hosts(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def on(self, kind: int = MULTI, *, nth: int | None = 1) -> Choice[ZooKeeperRequest]:
        """Choose requests of that type; the nth from now on, all if None."""

        def matches(unit: Unit[ZooKeeperRequest]) -> bool:
            return unit.request is not None and unit.request.kind == kind

        return Choice(partial(self._add, matches=matches, nth=nth))


async def _packet(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(_number(head, 0))


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big", signed=True)
