"""Every kind of database that can decide, as one suite needs it: made, opened again, written to by a user.

Run as ``python -m harness.deciding KIND PLACE POINT``: an owner that claims, decides, and dies by SIGKILL at that point.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import NullPool, create_engine, text

from dualwrite.interfaces import Database
from dualwrite.protocol.values import Decision
from dualwrite.stores.sql.database import database_of
from harness.databases import CLUSTER, prepare, prepare_mariadb, prepare_postgres, prepared, sqlite_url
from harness.dictionary import DictionaryDatabase

POINTS: Final = ("claimed", "begun", "decided", "committed")


class Kind(ABC):
    """One kind. Numbers stand for the user's rows."""

    alone = False
    """Whether only one process can have it open."""
    dies = False
    """Whether it dies with its process."""

    @abstractmethod
    def make(self, request: Any, path: Path) -> str:
        """Make an empty database, and return the text by which :meth:`open` finds it, in any process."""

    def open(self, place: str) -> Database:
        return database_of(place)

    @abstractmethod
    def put(self, handle: Any, number: int) -> None:
        """Write a row of the user's with the decision."""

    @abstractmethod
    def numbers(self, place: str) -> list[int]:
        """The user's rows that are committed, in order. Nobody has the database open, if it can be open only once."""


class Sql(Kind):
    def put(self, handle: Any, number: int) -> None:
        handle.execute(text("INSERT INTO orders (id) VALUES (:id)"), {"id": number})

    def numbers(self, place: str) -> list[int]:
        engine = create_engine(place, poolclass=NullPool)
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT id FROM orders ORDER BY id")).scalars())


class SQLiteFile(Sql):
    def make(self, request: Any, path: Path) -> str:
        del request
        made = prepare("sqlite", sqlite_url(path))
        made.dispose()
        return made.url


class PostgreSQLServer(Sql):
    def make(self, request: Any, path: Path) -> str:
        del path
        made = prepare_postgres(request.getfixturevalue("postgres_url"))
        made.dispose()
        return made.url


class MariaDBServer(Sql):
    def make(self, request: Any, path: Path) -> str:
        del path
        made = prepare_mariadb(request.getfixturevalue("mariadb_url"))
        made.dispose()
        return made.url


class InDictionary(Kind):
    alone = dies = True
    _made: dict[str, DictionaryDatabase] = {}  # noqa: RUF012 - of all tests

    def make(self, request: Any, path: Path) -> str:
        del request
        self._made[str(path)] = DictionaryDatabase()
        return str(path)

    def open(self, place: str) -> DictionaryDatabase:
        return self._made[place]

    def put(self, handle: Any, number: int) -> None:
        handle.batch.put(str(number), "")

    def numbers(self, place: str) -> list[int]:
        return sorted(map(int, self._made[place].keys.pairs))


class RocksDBDirectory(Kind):
    alone = True

    def make(self, request: Any, path: Path) -> str:
        del request
        from dualwrite.stores.keyed.rocksdb import RocksDatabase

        RocksDatabase(path / "rocks").close()
        return f"rocksdb:{path / 'rocks'}"

    def put(self, handle: Any, number: int) -> None:
        handle.batch.put(number, "")

    def numbers(self, place: str) -> list[int]:
        from rocksdict import AccessType, Rdict

        db = Rdict(place.removeprefix("rocksdb:"), access_type=AccessType.read_only())
        try:
            return sorted(db.keys())
        finally:
            db.close()


class ZooKeeperTree(Kind):
    def make(self, request: Any, path: Path) -> str:
        del path
        hosts, chroot = request.getfixturevalue("dualwrite_zookeeper").hosts, f"/deciding-{secrets.token_hex(4)}"
        with _kazoo(hosts) as client:
            client.ensure_path(f"{chroot}/orders")
        return f"zookeeper://{hosts}{chroot}"

    def put(self, handle: Any, number: int) -> None:
        handle.multi.create(f"/orders/{number}", b"")

    def numbers(self, place: str) -> list[int]:
        with _kazoo(place.removeprefix("zookeeper://")) as client:
            return sorted(map(int, client.get_children("/orders")))


@contextmanager
def _kazoo(hosts: str) -> Iterator[Any]:
    from kazoo.client import KazooClient

    client = KazooClient(hosts)
    client.start(timeout=60)
    try:
        yield client
    finally:
        client.stop()
        client.close()


KINDS: Final[dict[str, Kind]] = {
    "sqlite": SQLiteFile(),
    "postgresql": PostgreSQLServer(),
    "mariadb": MariaDBServer(),
    "dictionary": InDictionary(),
    "rocksdb": RocksDBDirectory(),
    "zookeeper": ZooKeeperTree(),
}


def owner(kind: Kind, place: str, point: str) -> None:
    """Claim, and make one dual write of the number 1; die at the point."""

    def at(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    database = kind.open(place)
    database.check()
    store = database.store()
    [row] = store.claim(["orders"], owner="dead", cluster_id=CLUSTER)
    at("claimed")
    with database.connect() as handle:
        store.begin(handle)
        assert store.read_incarnation(handle, "orders", namespace=row.namespace, known=row) == row.incarnation
        kind.put(handle, 1)
        at("begun")
        assert store.decide(handle, Decision("orders", row.incarnation, prepared(row.incarnation)))[0]
        at("decided")
        store.commit(handle, answer_s=30)
        at("committed")


if __name__ == "__main__":
    owner(KINDS[sys.argv[1]], sys.argv[2], sys.argv[3])
