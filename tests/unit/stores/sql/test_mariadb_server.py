"""Servers of MariaDB and MySQL that the library refuses, by their own answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.mariadb import Server
from dualwrite.stores.sql.tables import declare_tables


class Saying:
    """A connection to a server that answers so."""

    def __init__(self, replicates: str | None, *, is_mariadb: bool = True, version: tuple[int, ...] = (10, 11)) -> None:
        self.dialect = SimpleNamespace(is_mariadb=is_mariadb, server_version_info=version)
        self._replicates = replicates

    def execute(self, statement: Any, _: object = None) -> Any:
        replicates = self._replicates if "slave_running" in str(statement).lower() else None
        return SimpleNamespace(one=lambda: (0, 1, 0, 0, 0, 1, "utf8mb4", "STRICT_TRANS_TABLES", None, replicates))


def check(server: Saying) -> None:
    Server().check(server, declare_tables())  # type: ignore[arg-type]


def test_a_replica_that_may_be_written_to_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the server is a replica, although it may be written to"):
        check(Saying("ON"))
    check(Saying("OFF"))
    check(Saying(None))


def test_mysql_is_not_asked_what_it_does_not_show() -> None:
    check(Saying("ON", is_mariadb=False, version=(8, 4)))


def test_a_server_that_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"MariaDB 10\.5 is too old"):
        check(Saying(None, version=(10, 5)))
