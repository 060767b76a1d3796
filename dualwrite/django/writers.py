"""``settings.DUALWRITE``, and the writers that it describes: one for each alias of ``DATABASES``, in each process.

A writer is made and opened as it is first used, so in the process that uses it: after gunicorn's fork, and in Celery's child.
It is closed when the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, connections
from sqlalchemy import URL
from sqlalchemy.pool import NullPool

from dualwrite.stores.sql.access import new_engine

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.testing.memory.writer import InMemoryWriter
    from dualwrite.writing.writer import DualWriter

    Writer: TypeAlias = DualWriter | InMemoryWriter

_KEYS: Final = ("FLEET", "WRITER", "KAFKA", "SCHEMA", "OPTIONS", "IN_MEMORY")
_OF_DJANGO: Final = frozenset(
    {
        "assume_role",
        "context",
        "cursor_factory",
        "isolation_level",
        "options",
        "pool",
        "prepare_threshold",
        "server_side_binding",
    }
)
"""``OPTIONS`` of a database that are not libpq's, or are looked at by themselves."""


def settings_of(using: str) -> Mapping[str, Any]:
    """What ``settings.DUALWRITE`` says of a database.

    Raises:
        ImproperlyConfigured: Nothing, or what cannot work.
    """
    found = _all_settings().get(using)
    if found is None:
        raise ImproperlyConfigured(
            f"settings.DUALWRITE has no {using!r}: it names the writer for that alias of DATABASES"
        )
    where = f"settings.DUALWRITE[{using!r}]"
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured(f"{where} is not a dictionary")
    if unknown := sorted(map(str, found.keys() - set(_KEYS))):
        raise ImproperlyConfigured(f"{where} has {', '.join(unknown)}; it may have {', '.join(_KEYS)}")
    if ("FLEET" in found) == ("WRITER" in found) and not found.get("IN_MEMORY"):
        raise ImproperlyConfigured(
            f"{where} needs either FLEET, the name that all processes share, or WRITER, that of a single process"
        )
    if "KAFKA" not in found and not found.get("IN_MEMORY"):
        raise ImproperlyConfigured(f"{where} needs KAFKA: a dictionary with 'bootstrap.servers' at least")
    database = connections.settings.get(using)
    if database is None:
        raise ImproperlyConfigured(f"settings.DATABASES has no {using!r}, which settings.DUALWRITE names")
    _require_psycopg(using)
    return found


def aliases() -> Sequence[str]:
    """The aliases in ``settings.DUALWRITE``."""
    return list(_all_settings())


def _all_settings() -> Mapping[str, Any]:
    found = getattr(settings, "DUALWRITE", {})
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured(
            "settings.DUALWRITE is not a dictionary: of aliases of DATABASES, with a dictionary for each"
        )
    return found


def _require_psycopg(using: str) -> None:
    connection = connections[using]
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"the database {using!r} is {connection.display_name}: the Django app works with PostgreSQL through psycopg 3 "
            "alone. Write to other databases through SQLAlchemy: DualWriter(...).transaction()"
        )
    if connection.Database.__name__ != "psycopg":
        raise ImproperlyConfigured(
            "Django uses psycopg2, which dual writes cannot follow: pip install 'dualwrite[postgresql]', and uninstall psycopg2"
        )


def database_url(using: str = DEFAULT_DB_ALIAS) -> URL:
    """The SQLAlchemy URL of a database of Django's, with its password: for the writer, and for the command.

    Args:
        using: The alias of the database.

    Raises:
        ImproperlyConfigured: Django's settings have no such database, or it is another one than PostgreSQL.
    """
    _require_psycopg(using)
    connection: Any = connections[using]
    given = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name not in _OF_DJANGO}
    query = {name: str(value) for name, value in given.items() if value is not None}
    options = [connection.settings_dict["OPTIONS"].get("options", "")]
    if role := connection.settings_dict["OPTIONS"].get("assume_role"):
        options.append("-c role=" + "".join(f"\\{letter}" if letter in " \\" else letter for letter in role))
    if shown := " ".join(filter(None, options)):
        query["options"] = shown
    found = connection.settings_dict
    host, port = found["HOST"] or None, found["PORT"] or None
    if host is not None and (host.startswith("/") or "," in host):
        query["host"] = host  # a directory with a socket, or several servers
        host = None
        if port is not None:
            query["port"] = str(port)
            port = None
    return URL.create(
        "postgresql+psycopg",
        found["USER"] or None,
        found["PASSWORD"] or None,
        host,
        None if port is None else int(port),
        found["NAME"] or None,
        query,
    )


class Writers:
    """The writers of this process, by alias: ``writers["default"]``. Any thread may use them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Writer, Engine]] = {}
        self._of_parents: list[object] = []
        self._lock = threading.RLock()

    def __getitem__(self, using: str) -> Writer:
        """The writer for a database, which is made and opened if it is not.

        It opens without waiting: while a server is away, the first transactions wait for two seconds at most, and then raise
        `Unavailable`.

        Raises:
            ImproperlyConfigured: The settings cannot work.
            ConfigurationError: An option of the writer cannot work.
        """
        with self._lock:
            if using not in self._open:
                self._open[using] = _open(using)
            return self._open[using][0]

    def close(self) -> None:
        """Close all of them: running transactions and units are finished, and what is left is settled.

        The next use opens new ones. Called by itself when the process ends, or a test changes ``DUALWRITE``. Call it in tests
        that use real servers, before the test's database is dropped.

        Raises:
            DualWriteError: As :meth:`DualWriter.close`, once all are closed: the first one.
        """
        with self._lock:
            closing, self._open = list(self._open.values()), {}
        errors: list[BaseException] = []
        for writer, engine in closing:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 - raised below, when the others are closed, too
                errors.append(error)
            finally:
                engine.dispose()
        if errors:
            raise errors[0]

    def _leave_to_parent(self) -> None:
        """In a forked process. What is collected would close the parent's connections."""
        self._of_parents.append(self._open)
        self._open, self._lock = {}, threading.RLock()


def _open(using: str) -> tuple[Writer, Engine]:
    found = settings_of(using)
    options = dict(found.get("OPTIONS", {}))
    if found.get("IN_MEMORY"):
        from dualwrite.testing.memory.writer import InMemoryWriter  # noqa: PLC0415 - for tests

        engine = new_engine(database_url(using), poolclass=NullPool)  # nothing is left in the way of DROP DATABASE
        name = found.get("FLEET") or found.get("WRITER") or "in-memory"
        kept: dict[str, Any] = {key: options[key] for key in _OF_MEMORY if key in options}
        memory = InMemoryWriter(name, database=engine, **kept)
        memory.open()
        return memory, engine
    from dualwrite.writing.writer import DualWriter  # noqa: PLC0415 - loads the clients of Kafka

    engine = new_engine(database_url(using))
    given: dict[str, Any] = {"kafka": found["KAFKA"], "database": engine, "schema": found.get("SCHEMA"), **options}
    writer = DualWriter.leased(found["FLEET"], **given) if "FLEET" in found else DualWriter(found["WRITER"], **given)
    writer.open(wait=False)
    return writer, engine


_OF_MEMORY: Final = ("outbox", "limits", "bulk", "serializers")

writers: Final = Writers()
"""The writers of this process, by alias of ``DATABASES``."""


def _changed(*, setting: str, **_: object) -> None:
    if setting == "DUALWRITE":
        writers.close()


setting_changed.connect(_changed, dispatch_uid="dualwrite.django")
atexit.register(writers.close)
os.register_at_fork(after_in_child=writers._leave_to_parent)  # noqa: SLF001 - of this module
