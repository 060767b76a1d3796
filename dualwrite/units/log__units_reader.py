"""``UnitReader``: reads the units of one partition into an image."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.protocol.lives__protocol_tables_unit_life import Effect
from dualwrite.units.image import Follower, Snapshot, UnitImage
from dualwrite.units.log import PartitionLogs

if TYPE_CHECKING:
    from typing_extensions import Self

Contents = TypeVar("Contents")

_SHOWN: Final = frozenset({Effect.SHOW, Effect.PUBLISH})


class UnitReader(Generic[Contents]):
    """Reads a partition into an image, which shows whole units only. A context manager.

    It applies records as it reads them, publishes at the end of a unit and reverts at an abort: it needs memory for the image,
    not for the unit. One thread reads; any thread may take snapshots. It joins no consumer group and commits no offsets: keep
    a `Snapshot`, or read from the beginning.

    Args:
        topic: The topic.
        partition: The number of the partition.
        kafka: librdkafka configuration; ``bootstrap.servers`` at least. Only its connection settings are used.
        image: What it applies records to: a `KeyedImage`, or one of yours.
        position: That of the snapshot that the image begins with; None to read the log from its beginning.

    Raises:
        ConfigurationError: A setting cannot work.

    Source: KIP-868, "record visibility".
    """

    def __init__(
        self,
        topic: str,
        partition: int = 0,
        *,
        kafka: Mapping[str, object],
        image: UnitImage[Contents],
        position: int | None = None,
    ) -> None:
        self._name = topic, partition
        self._follower = Follower(image, position)
        self._shows_more = False
        self._logs = PartitionLogs(kafka, follows=True)
        self._logs.follow(self._name, position)

    def poll(self, timeout_s: float = 1.0) -> bool:
        """Read what there is, or wait for it. Returns whether the image shows more than when a call last returned.

        An exception may leave it (a time limit, Ctrl-C). The next call continues with the first record that was not applied;
        if the exception has struck while a record was applied, all further calls refuse, and the image stays as it is.

        Args:
            timeout_s: The longest wait, in seconds.

        Raises:
            ConfigurationError: The log breaks the rules of units, retention has deleted what comes next, or a right is missing.
            IllegalStateError: An exception has left an earlier call while it applied a record: open another reader.
        """
        for offset, record in self._logs.following(timeout_s):
            if self._follower.read(offset, record) in _SHOWN:
                self._shows_more = True
        shows_more, self._shows_more = self._shows_more, False
        return shows_more

    def catch_up(self, timeout_s: float = 60.0) -> None:
        """Read all that Kafka shows at the time of the call. A unit whose end it shows by then is visible on return.

        Kafka answers a commit a moment before it shows what was committed.

        Args:
            timeout_s: Limits the whole call, in seconds.

        Raises:
            Unavailable: It was not read in time.
            ConfigurationError, IllegalStateError: As :meth:`poll`.
        """
        deadline = Deadline(timeout_s)
        end = self._logs.offsets([self._name], deadline)[self._name].end
        while self._logs.reached < end:
            if deadline.expired:
                raise Unavailable(f"{self._name[0]}[{self._name[1]}] was not read to offset {end} in time")
            self.poll(min(1.0, deadline.remaining_s()))

    def snapshot(self) -> Snapshot[Contents]:
        """All that the image shows, and the position to resume from: no markers, and no part of a unit.

        Raises:
            IllegalStateError: An exception has left the image in the middle of a record.
        """
        return self._follower.snapshot()

    def close(self) -> None:
        """Disconnect."""
        self._logs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
