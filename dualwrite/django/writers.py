"""``settings.DUALWRITE``, the writers that it describes, and ``produce()``: messages that commit with Django's own transaction.

A writer is made and opened as it is first used, so in the process that uses it: after gunicorn's fork, and in Celery's child.
It is closed when the process ends.

The first message joins the transaction of the outermost ``atomic()`` to a dual write. From then on the connection's COMMIT,
ROLLBACK and close are those of the dual write. Django calls them where it always does: so a nested ``atomic()``, ``durable``,
``ATOMIC_REQUESTS``, marks for rollback and ``on_commit`` keep their meaning, whatever code uses them.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections
from sqlalchemy import URL
from sqlalchemy.pool import NullPool

from dualwrite.errors import (
    CompletionPending,
    DecidedTransactionLost,
    DualWriteError,
    IllegalStateError,
    OutcomeUnverifiable,
)
from dualwrite.protocol.message import ProducerRecord
from dualwrite.stores.sql.access import leave_to_parent, new_engine
from dualwrite.stores.sql.adopted import InAtomic
from dualwrite.writing.transaction import as_value, raise_aborted, write_of

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message
    from django.db.backends.base.base import BaseDatabaseWrapper

    from dualwrite.writing.dual_write import DualWrite
    from dualwrite.writing.transaction import Transaction


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
        from dualwrite.kafka.config import wants_bulk  # noqa: PLC0415 - a client of Kafka's
        from dualwrite.testing.memory.writer import InMemoryWriter  # noqa: PLC0415 - for tests

        engine = new_engine(database_url(using), poolclass=NullPool)  # nothing is left in the way of DROP DATABASE
        name = found.get("FLEET") or found.get("WRITER") or "in-memory"
        kept: dict[str, Any] = {key: options[key] for key in _OF_MEMORY if key in options}
        memory = InMemoryWriter(name, database=engine, bulk=wants_bulk(found.get("KAFKA", {})), **kept)
        memory.open()
        return memory, engine
    from dualwrite.writing.writer import DualWriter  # noqa: PLC0415 - loads the clients of Kafka

    engine = new_engine(database_url(using))
    given: dict[str, Any] = {"kafka": found["KAFKA"], "database": engine, "schema": found.get("SCHEMA"), **options}
    writer = DualWriter.leased(found["FLEET"], **given) if "FLEET" in found else DualWriter(found["WRITER"], **given)
    writer.open(wait=False)
    return writer, engine


_OF_MEMORY: Final = ("outbox", "limits", "serializers")

writers: Final = Writers()
"""The writers of this process, by alias of ``DATABASES``."""


def _changed(*, setting: str, **_: object) -> None:
    if setting == "DUALWRITE":
        writers.close()


setting_changed.connect(_changed, dispatch_uid="dualwrite.django")
atexit.register(writers.close)
os.register_at_fork(after_in_child=writers._leave_to_parent)  # noqa: SLF001 - of this module


_JOINED: Final = "_dualwrite"
_CAPTURED: Final = "_dualwrite_captured"
_AFTER_THE_DECISION: Final = (CompletionPending, DecidedTransactionLost, OutcomeUnverifiable)


def produce(
    topic: str,
    value: object = None,
    key: object = None,
    *,
    using: str = DEFAULT_DB_ALIAS,
    partition: int | None = None,
    headers: Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]] | None = None,
    timestamp_ms: int | None = None,
    on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
) -> None:
    """Hand one message to the producer, in the transaction of Django's ``atomic()``; see :meth:`Transaction.produce`.

    Nothing is durable on return. The message becomes visible once the outermost ``atomic()`` has committed both sides; it is
    dropped with an inner one that is rolled back.

    Args:
        topic: The topic.
        value: The value: bytes, a text, None, or what the writer's serializer takes.
        key: The key, likewise.
        using: The alias of the database, in ``DATABASES`` and ``DUALWRITE``, whose transaction the message belongs to.
        partition: As for :meth:`Transaction.produce`.
        headers: As there.
        timestamp_ms: As there.
        on_delivery: As there.

    Raises:
        IllegalStateError: There is no transaction: call it inside ``atomic()``.
        TransactionManagementError: Django's: the transaction is marked for rollback.
        DualWriteError: As :func:`join` and :meth:`Transaction.produce`. The transaction can no longer commit.
    """
    join(using).produce(
        topic, value, key, partition=partition, headers=headers, timestamp_ms=timestamp_ms, on_delivery=on_delivery
    )
    captured: list[list[_Marker]] = vars(connections[using]).get(_CAPTURED, [])
    if captured:
        pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
        marker = _Marker(ProducerRecord(topic, value, key, tuple(pairs), partition, timestamp_ms))
        connections[using].on_commit(marker)
        for markers in captured:
            markers.append(marker)


def join(using: str = DEFAULT_DB_ALIAS) -> Transaction:
    """Let the transaction of Django's ``atomic()`` join a dual write, unless it has; :func:`produce` does so by itself.

    Call it before the first statement if the connection's isolation level is REPEATABLE READ or SERIALIZABLE.

    Args:
        using: The alias of the database.

    Returns:
        The dual write, for its other methods (``produce_many``, ``send_offsets_to_transaction``); usable until the transaction
        ends. Its rows are Django's: it has no session.

    Raises:
        IllegalStateError: There is no transaction, or this thread is inside a block of the same writer.
        TransactionManagementError: Django's: the transaction is marked for rollback.
        ImproperlyConfigured: Django's: ``settings.DUALWRITE`` has no such alias, or cannot be used.
        ConfigurationError: The database is not PostgreSQL through psycopg 3, or not the writer's.
        Unavailable: No lane was free, or a server does not answer.
        Fenced: Another owner took over.
    """
    connection = connections[using]
    joined: _Joined | None = vars(connection).get(_JOINED)
    if joined is None:
        if connection.get_autocommit():
            raise IllegalStateError(
                f"there is no transaction on the database {using!r}",
                next_step="produce inside transaction.atomic(): the message commits with its rows",
            )
        connection.validate_no_broken_transaction()
        joined = _Joined(connection)
        joined.begin(using)
    else:
        connection.validate_no_broken_transaction()
    return joined.transaction


class _RolledBack(Exception):
    """Leaves the block of a dual write that Django rolls back."""


class _Joined:
    """One dual write in the transaction of Django's connection, until Django ends it. It ends both sides, in Django's place.

    ``refusal`` is the error after which the transaction must not commit, as a value: a row without its message.
    """

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection: Any = connection
        self._writer: str | None = None
        self._block: AbstractContextManager[Transaction] | None = None
        self._transaction: Transaction | None = None
        self._refusal: DualWriteError | None = None

    @property
    def transaction(self) -> Transaction:
        if self._refusal is not None:
            self._raise_aborted(self._refusal)
        assert self._transaction is not None
        return self._transaction

    def begin(self, using: str) -> None:
        """Begin the dual write. From now on the end of the transaction is ours, even if this fails."""
        self._connection.ensure_connection()
        vars(self._connection).update(
            {_JOINED: self, "_commit": self._commit, "_rollback": self._roll_back, "_close": self._close}
        )
        try:
            writer = writers[using]
            self._writer = writer.transactional_id
            block = writer._joined(None)[1](None, InAtomic(self._connection))  # type: ignore[arg-type] # noqa: SLF001 - our own
            self._transaction = block.__enter__()
        except BaseException as error:
            self._refusal = as_value(error)
            raise
        self._block = block

    def _commit(self) -> None:
        """In place of COMMIT. Raises as the end of a block does."""
        with self._ending() as connection:
            if self._refusal is not None:
                try:
                    connection.rollback()
                except DatabaseError:
                    connection.close()
                self._raise_aborted(self._refusal)
            assert self._block is not None
            try:
                self._block.__exit__(None, None, None)
            except _AFTER_THE_DECISION:
                connection.run_commit_hooks_on_set_autocommit_on = True  # the rows are committed
                raise
            if connection.connection is not None and connection.connection.closed:
                _connect_again(connection)  # it was lost on the way

    def _roll_back(self) -> None:
        """In place of ROLLBACK."""
        with self._ending() as connection:
            self._abort()
            connection._rollback()  # noqa: SLF001 - Django's own, which finds nothing left; or all, if nothing has begun

    def _close(self) -> None:
        """In place of closing the connection, inside the transaction."""
        with self._ending() as connection:
            self._abort()
            connection._close()  # noqa: SLF001 - Django's own

    @contextmanager
    def _ending(self) -> Generator[Any, None, None]:
        """The end of the transaction. If it is interrupted, at any line, both sides have ended nevertheless.

        A connection that was lost on the way, or is still in the transaction, is not left to Django, which would go on with it.
        """
        try:
            self._let_go()
            yield self._connection
        except BaseException as error:
            self._let_go()
            connection, block, transaction = self._connection, self._block, self._transaction
            self._block = self._transaction = None  # what is left of them ends as they are collected
            if not isinstance(error, _AFTER_THE_DECISION):
                # Django keeps them after an error that is not one of the database's, and would run them after the next COMMIT.
                connection.run_on_commit = []
                connection.needs_rollback = False
            if block is not None and transaction is not None and cast("DualWrite", write_of(transaction)).running:
                block.__exit__(type(error), error, error.__traceback__)
            driver = connection.connection
            if driver is not None and (driver.closed or driver.info.transaction_status):
                _connect_again(connection)
            raise

    def _abort(self) -> None:
        if self._block is not None:
            self._block.__exit__(_RolledBack, _RolledBack(), None)

    def _let_go(self) -> None:
        leave_to_parent()
        for name in (_JOINED, "_commit", "_rollback", "_close"):
            vars(self._connection).pop(name, None)

    def _raise_aborted(self, refusal: DualWriteError) -> NoReturn:
        raise_aborted(refusal, self._writer, "the transaction")


def _connect_again(connection: Any) -> None:
    """Close the connection, so that Django makes another, and keep the functions that run after the commit."""
    hooks = connection.run_on_commit
    connection.close()
    connection.run_on_commit = hooks


# Tests that Django rolls back: their messages are never sent, but can be looked at.


class _Marker:
    """A message, as a hook of ``on_commit``, which Django drops with the savepoint that it belongs to."""

    def __init__(self, record: ProducerRecord) -> None:
        self.record = record
        self.committed = False

    def __call__(self) -> None:
        self.committed = True


@contextmanager
def captured_messages(using: str = DEFAULT_DB_ALIAS) -> Generator[list[ProducerRecord], None, None]:
    """Collect the messages that the code in the block produces, for a ``TestCase``, whose transaction never commits.

    The list is filled at the end of the block: with the messages that a COMMIT there would send, or has sent, as they were
    given to :func:`produce`, in their order. Messages of an ``atomic()`` that was rolled back are not in it.

    Args:
        using: The alias of the database.
    """
    connection: Any = connections[using]
    markers: list[_Marker] = []
    found: list[ProducerRecord] = []
    captured = vars(connection).setdefault(_CAPTURED, [])
    captured.append(markers)
    try:
        yield found
    finally:
        captured.remove(markers)
        kept = {id(hook) for _, hook, _ in connection.run_on_commit}
        found += [one.record for one in markers if id(one) in kept or one.committed]
