"""Keeps connections, and lanes with their producers, from task to task in a reused Python worker.

A task then needs no claim and no new producer. Nothing relies on the cache: a lane continues only if its row says that it
may (:meth:`dualwrite.writing.lane.Lane.may_go_on`), and is claimed again otherwise. The cache ends with the process,
which Spark ends after the worker has been idle for a minute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext

from dualwrite.errors import DualWriteError
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.producer import TransactionalProducer
from dualwrite.recovery.claim import OwnerContext, unique_owner
from dualwrite.sinks.spark.databases.database__sinks_spark_databases_opening import open_database
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.writing.lane import Lane

if TYPE_CHECKING:
    from dualwrite.protocol.values__protocol_rows import StateRow
    from dualwrite.sinks.spark.options import SinkOptions

logger = logging.getLogger(__name__)

_MOST_LANES: Final = 8
_MOST_SINKS: Final = 4


class WorkerCache:
    """One sink's connections in this process, and the lanes that rest on them. For one task at a time.

    Attributes:
        options: The sink's settings.
        database: The database.
        engine: Its engine.
        context: The two servers.

    Raises:
        ConfigurationError: A setting refers to an environment variable that is not set.
    """

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._config = options.kafka_config()
        self.database = open_database(options)
        self.engine = self.database.engine
        store = SqlStateStore(self.engine, schema=options.schema)
        self.context = OwnerContext(KafkaCoordinator(self._config), store, unique_owner())
        self._resting: dict[str, Lane] = {}
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process created it: a forked process must not use it."""
        return self._pid == os.getpid()

    @property
    def outlives_its_task(self) -> bool:
        """Whether it stays for the next task in this process."""
        return self.options.keep_slots and TaskContext.get() is not None

    @property
    def has_room(self) -> bool:
        """Whether one more lane can rest here."""
        return self.outlives_its_task and len(self._resting) < _MOST_LANES

    def resting(self) -> tuple[str, ...]:
        """The transactional ids of the lanes that rest here, the last one used first.

        Discards lanes whose row another process has claimed: they would only get in the way of the new owner.

        Raises:
            ConfigurationError, Unavailable: The rows could not be read.
        """
        if self._resting:
            found = {row.transactional_id: row for row in self.context.store.read(list(self._resting))}
            for name, lane in list(self._resting.items()):
                row = found.get(name)
                if row is None or (row.namespace, row.incarnation) != (lane.row.namespace, lane.row.incarnation):
                    self._resting.pop(name).discard()
        return tuple(reversed(self._resting))

    def take(self, transactional_id: str) -> Lane:
        """Take the lane that rests here if it may continue; else create a new one, which must be claimed."""
        lane = self._resting.pop(transactional_id, None)
        if lane is None:
            return self._new_lane(transactional_id)
        try:
            if lane.may_go_on():
                return lane
        except DualWriteError as error:
            logger.info("%s: the row could not be read: %s", transactional_id, error)
        lane.discard()
        return self._new_lane(transactional_id)

    def keep(self, lane: Lane) -> None:
        """Let a lane rest here if there is room; else discard it."""
        if self.has_room:
            self._resting[lane.transactional_id] = lane
        else:
            lane.discard()

    def close(self) -> None:
        """Close everything. Transactions that were handed over stay open."""
        for lane in self._resting.values():
            lane.discard()
        self._resting.clear()
        self.context.coordinator.close()
        self.engine.dispose()

    def _new_lane(self, transactional_id: str) -> Lane:
        return Lane(transactional_id, self.context, self._make_producer)

    def _make_producer(self, row: StateRow) -> TransactionalProducer:
        return TransactionalProducer(
            self._config,
            row.kafka_id(row.incarnation),
            coordinator=self.context.coordinator,
            incarnation=row.incarnation,
            call_timeout_s=self.options.timeout_s,
            bulk=True,
            engine=self.options.producer_engine,
        )


_kept: Final[dict[str, WorkerCache]] = {}
"""By pool; excludes those in use."""


@contextmanager
def servers(options: SinkOptions) -> Generator[WorkerCache, None, None]:
    """The sink's connections and lanes: those that an earlier task left here, or new ones.

    They are closed when the block ends: outside of a Spark task, if the sink keeps nothing, and after an error.

    Raises:
        ConfigurationError: As `WorkerCache`.
    """
    found = _taken(options) or WorkerCache(options)
    try:
        yield found
    except BaseException:
        found.close()
        raise
    if found.outlives_its_task:
        _keep(found)
    else:
        found.close()


def _taken(options: SinkOptions) -> WorkerCache | None:
    found = _kept.pop(options.pool, None)
    if found is None or not found.is_ours:
        return None
    if found.options != options:
        found.close()
        return None
    return found


def _keep(found: WorkerCache) -> None:
    former = _kept.pop(found.options.pool, None)
    if former is not None:  # left by a task that ran at the same time in this process
        former.close()
    _kept[found.options.pool] = found
    if len(_kept) > _MOST_SINKS:
        _kept.pop(next(iter(_kept))).close()
