"""The port for observers of dual writes, settling and writers. The implementations here do nothing.

An observer changes nothing except the headers of messages, and raises nothing. The recipes call it at few places: where a dual
write moves to its next phase, where messages are produced, where something was settled, and where a loss is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
from dualwrite.protocol.lives__protocol_tables_write_phases import Phase
from dualwrite.protocol.process__protocol_process_health import Health

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable

Text = str | bytes | None
Headers = Mapping[str, Text] | Sequence[tuple[str, Text]] | None


class Settled(Protocol):
    """The result of a settling, as far as observers need it."""

    @property
    def rolled_forward(self) -> Sequence[str]:
        """The transactional ids whose decided transaction was committed."""
        ...

    @property
    def retired(self) -> int:
        """How many Kafka ids were made unusable, which aborts what is open there."""
        ...

    @property
    def repaired(self) -> Sequence[str]:
        """The transactional ids for which markers were written that a broker had forgotten."""
        ...


class WriteObserver:
    """Observes one dual write, inside whose ``with`` block everything happens."""

    def lane(self, transactional_id: str) -> None:
        """It has a lane, ready for use: the id that it runs under. The database's transaction is next."""

    def enter(self, phase: Phase) -> None:
        """A phase begins, and the one before has ended."""

    def moved(self, state: WriteState) -> None:
        """The dual write has moved to another state."""

    def producing(self, topic: str, headers: Headers) -> Headers:
        """Messages of this topic are about to be produced. Returns the headers to produce them with."""
        del topic
        return headers

    def sent(self, topic: str, count: int) -> None:
        """Messages were handed to the producer, those of released savepoints included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The block has ended, with this error if any."""


class SettleObserver:
    """Observes one settling, inside whose ``with`` block everything happens."""

    def settled(self, report: Settled) -> None:
        """It has ended with this report."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The block has ended, with this error if any."""


class Observer:
    """Observes writers and recoveries. Used by many threads at once."""

    def writing(self, writer: str, database: str) -> WriteObserver:
        """A dual write begins.

        Args:
            writer: The writer's transactional id.
            database: SQLAlchemy's name of the kind of database.
        """
        del writer, database
        return NO_WRITE_OBSERVER

    def grouped(self, writer: str, units: int) -> None:
        """A group has ended; it had begun that number of units."""

    def settling(self, transactional_ids: Sequence[str]) -> SettleObserver:
        """Ids were claimed, and are about to be settled."""
        del transactional_ids
        return NO_SETTLE_OBSERVER

    def recovering(self) -> SettleObserver:
        """A recovery begins."""
        return NO_SETTLE_OBSERVER

    def lost(self, loss: DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack) -> None:
        """A loss is reported that did not leave a block as its error."""

    def opened(self, health: Callable[[], Health], longest_open_s: Callable[[], float | None]) -> Callable[[], None]:
        """A writer is opening.

        Args:
            health: The writer's health.
            longest_open_s: The age of the oldest transaction open in Kafka, in seconds, as the brokers last reported it; None
                if it is not known. A call has Kafka asked again in the background, now and then.

        Both may be called at any time, by any thread, and return at once.

        Returns:
            A function to call when the writer is closed. It may be called more than once.
        """
        del health, longest_open_s
        return _nothing


def _nothing() -> None:
    pass


NO_WRITE_OBSERVER = WriteObserver()
NO_SETTLE_OBSERVER = SettleObserver()
NO_OBSERVER = Observer()
