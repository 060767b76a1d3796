"""A dual write divided into units: each has its own savepoint, messages and session, and is kept or dropped by itself."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import exc

from dualwrite import failpoints, waiting
from dualwrite.errors import DualWriteError, IllegalStateError, TransactionAborted
from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
from dualwrite.writing.dual_write__writing_blocks_sending import as_value, raise_aborted
from dualwrite.writing.transaction import Transaction, unit_of, write_of
from dualwrite.writing.transaction__writing_arguments import conflicts_named

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from dualwrite.interfaces__ports_observer import WriteObserver
    from dualwrite.interfaces__ports_savepoints import SavepointWatch
    from dualwrite.protocol.message import Sendable
    from dualwrite.protocol.prepared_state import PreparedTxnState
    from dualwrite.writing.dual_write import DualWrite


class Uses:
    """The uses of a unit by its code, each a block: those under way are waited for at its end, and later ones refused.

    A part of the unit may run on in another task or thread: its statement, or its message, must not fall into the next unit.

    Args:
        transactional_id: For the error.
    """

    def __init__(self, transactional_id: str) -> None:
        self._id = transactional_id
        self._changed = waiting.Condition()
        self._under_way = 0
        self._ended = False
        self._ended_by: object = None

    def require(self) -> None:
        """Raise if the unit has ended.

        Raises:
            IllegalStateError: It has.
        """
        if self._ended and (self._ended_by is None or self._ended_by != waiting.here().caller):
            raise IllegalStateError(
                "the unit of work has ended, and its connection and messages with it: nothing of this call was written",
                transactional_id=self._id,
                next_step="await or join all parts of a unit before it ends: asyncio.TaskGroup does, gather does not",
            )

    def __enter__(self) -> None:
        with self._changed:
            self.require()
            self._under_way += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def end(self) -> None:
        """Refuse later ones, and wait for those under way. Only the caller may continue, until :meth:`close`."""
        with self._changed:
            self._ended = True
            while self._under_way:
                self._changed.wait()
        self._ended_by = waiting.here().caller

    def close(self) -> None:
        """Refuse all later ones."""
        self._ended, self._ended_by = True, None


class UnitWrite:
    """One unit of a dual write. Implements :class:`dualwrite.writing.transaction.Write`.

    Args:
        write: The dual write.
        connection: The connection of the unit.
        uses: Entered for each use of the unit.

    Attributes:
        uses: As given.
        size: The size of its messages, in bytes.
        dropped: Whether it was rolled back.
    """

    def __init__(self, write: DualWrite, connection: Connection, uses: Uses) -> None:
        self._write = write
        self._connection = connection
        self._session = write.new_session(self.refuse, connection)
        self._refusal: DualWriteError | None = None
        self.uses = uses
        self.size = 0
        self.dropped = False

    def refuse(self, error: DualWriteError) -> None:
        """See :class:`dualwrite.writing.transaction.Write`. It concerns this unit alone."""
        self._refusal = self._refusal or as_value(error)

    @property
    def transactional_id(self) -> str:
        """See :class:`dualwrite.writing.transaction.Write`."""
        return self._write.transactional_id

    @property
    def state(self) -> WriteState:
        """See :class:`dualwrite.writing.transaction.Write`. That of its group, unless the unit was rolled back."""
        return WriteState.ABORTED if self.dropped else self._write.state

    @property
    def prepared(self) -> PreparedTxnState | None:
        """See :class:`dualwrite.writing.transaction.Write`."""
        return self._write.prepared

    @property
    def observer(self) -> WriteObserver:
        """See :class:`dualwrite.writing.transaction.Write`."""
        return self._write.observer

    def given(self, name: str) -> Any:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.require_open()
        return self._write.given(name)

    @property
    def connection(self) -> Connection:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.require_open()
        return self._connection

    @property
    def session(self) -> Session:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.require_open()
        self._write.sending.expect_session()
        return self._session.session

    @property
    def in_savepoint(self) -> bool:
        """See :class:`dualwrite.writing.transaction.Write`. The unit itself is one."""
        return True

    def require_open(self) -> None:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self.uses.require()
        self._write.require_open()

    @property
    def max_message_bytes(self) -> int:
        """See :class:`dualwrite.writing.transaction.Write`."""
        return self._write.max_message_bytes

    def refuse_callback(self) -> None:
        """See :class:`dualwrite.writing.transaction.Write`."""
        self._write.refuse_callback()

    def send(self, message: Sendable) -> None:
        """See :class:`dualwrite.writing.transaction.Write`. An error concerns this unit alone."""
        with self.uses:
            self._write.require_open()
            try:
                self.size += self._write.sending.hold(message)
            except IllegalStateError:
                raise  # nothing was changed
            except DualWriteError as error:
                self.refuse(error)
                raise
        failpoints.hit("write.produced")

    def finish(self) -> None:
        """Flush its session, and release the savepoints that it has left open.

        Raises:
            TransactionAborted, Fenced: It continued after an error.
            SQLAlchemyError: The database refuses what was flushed.
        """
        if self._refusal is not None:
            raise_aborted(self._refusal, self.transactional_id, "the unit")
        self._session.flush()
        while (nested := self._connection.get_nested_transaction()) is not None:
            nested.commit()

    def close(self) -> None:
        """Close its session. Its objects stay readable. Never raises: the connection may be lost, or refused to a late part."""
        with suppress(exc.SQLAlchemyError, IllegalStateError):
            self._session.close()


class Divided:
    """Begins and ends the units of one dual write, one at a time. The block of the dual write is around it.

    Args:
        transaction: The transaction of the block.

    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._write = cast("DualWrite", write_of(transaction))
        self._unit: UnitWrite | None = None
        self._kept_size = 0

    @property
    def size(self) -> int:
        """The size of the messages of the units that were kept, and of the present one, in bytes."""
        return self._kept_size + (0 if self._unit is None else self._unit.size)

    @property
    def _savepoints(self) -> SavepointWatch:
        savepoints = self._write.sending.savepoints
        assert savepoints is not None
        return savepoints

    def begin(self) -> Transaction:
        """Begin a unit. Returns its transaction.

        Raises:
            DualWriteError: The group cannot continue.
        """
        uses = Uses(self._write.transactional_id)
        self._unit = UnitWrite(self._write, self._savepoints.open_unit(uses), uses)
        failpoints.hit("group.unit_begun")
        return unit_of(self._transaction, self._unit)

    def work_ended(self) -> None:
        """End what the unit may do, also by parts that continue. Then make sure that the database has opened its savepoint.

        Otherwise errors of its work are not its own.

        Raises:
            DualWriteError: The group cannot continue.
        """
        assert self._unit is not None
        self._unit.uses.end()
        self._savepoints.require_unit()

    def end(self, error: BaseException | None) -> BaseException | None:
        """End the unit: keep it, or roll it back if its work has failed.

        Args:
            error: The error of its work, if any.

        Returns:
            The error that it has failed with, or None if it is kept.

        Raises:
            DualWriteError: The group cannot continue.
        """
        unit, self._unit = self._unit, None
        assert unit is not None
        if error is None:
            error = self._kept(unit)
        if error is not None:
            unit.dropped = True
            unit.close()
            unit.uses.close()
            self._savepoints.drop_unit()
            failpoints.hit("group.unit_dropped")
            return named(error, unit.transactional_id)
        unit.close()
        unit.uses.close()
        self._kept_size += unit.size
        failpoints.hit("group.unit_kept")
        return None

    def give_up(self) -> None:
        """Leave the present unit, if any, as it is: the group ends with an error. Never raises."""
        if self._unit is not None:
            self._unit.uses.close()

    def _kept(self, unit: UnitWrite) -> BaseException | None:
        try:
            unit.finish()
        except Exception as error:  # noqa: BLE001 - becomes the unit's own
            return error
        reason = self._savepoints.keep_unit()
        if reason is None:
            return None
        return TransactionAborted(
            reason,
            transactional_id=unit.transactional_id,
            next_step="after a failed statement, stop; or run it in a savepoint (begin_nested)",
            retryable=False,
        )


def named(error: BaseException, transactional_id: str) -> BaseException:
    """The error a block would raise: conflicts are mapped to ``TransactionAborted``."""
    try:
        with conflicts_named(transactional_id):
            raise error
    except BaseException as named:  # noqa: BLE001 - becomes the unit's own
        return named
