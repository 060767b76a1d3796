"""Finds processes and late requests that are at their end: they can change nothing any more, whatever else happens.

Most of what a search meets are owners long overtaken, each at another line of its program, and requests that the broker will
refuse whenever they arrive. A state is looked up without them: an owner at its end counts as done, a request that will be
refused as gone. That is sound, since nothing else could ever tell:

- The verdict about a state looks at the row, the broker, late requests and what was spent, never at processes.
- What is at its end stays so: the row's owner has overtaken for good, an epoch only rises, a state that the row shows no
  longer it never shows again, and an incarnation that is used up is not given back.
- Each step that it could still take leaves row and broker as they are, tells nobody anything wrong, and leads to the next
  such step. At most it spends a misfortune on a request that is refused; with one more to come all is possible that is
  possible with one less, and no more is excused.

So the smaller search comes to the same rows and brokers, and to a fault by as many steps. That a process is at its end is not
read from a list of cases: all its steps are taken, so that a mistake which makes one of them matter is seen.
"""

from __future__ import annotations

from simulator import requests as sim
from simulator.partition import producer
from simulator.state import Broker, partition, transaction

from dualwrite.protocol.lives import ProducerState, WriteState
from dualwrite.protocol.prepared_state import Engine
from search.process import Walk
from search.values import DONE, NOTHING, PLACES, STOPPED, Database, Process

_AT_REST = frozenset({sim.EMPTY, sim.COMPLETE_COMMIT, sim.COMPLETE_ABORT})
_ASKING = frozenset({"add", "produce", "end", "abort", "raise_epoch"})
_OWNING = _ASKING | {"begin", "update"}
"""The positions of an owner that has a producer, and no lock of the row."""


class Ends:
    """Tells what is at its end.

    Args:
        walk: The steps of processes.
        forgets: Whether the coordinator may forget ids. No process is refused for ever then: an unknown id is created.
    """

    def __init__(self, walk: Walk, *, forgets: bool) -> None:
        self._walk = walk
        ids = {walk.rules.kafka_id(incarnation) for incarnation in range(1, walk.most + 1)}
        self._refuses_for_ever = not forgets and len(ids) == walk.most

    def finished(self, process: Process, database: Database, broker: Broker) -> bool:
        """Whether nothing that the process may do changes anything, now or later."""
        if process in {DONE, STOPPED}:
            return True
        if not self._out_of_it(process, database, broker):
            return False
        free = database._replace(lock=None)
        return all(
            move.wrong is None
            and move.database == free
            and move.broker == broker
            and (move.sent is None or self.refused(move.sent, broker))
            and (move.process == process or self.finished(move.process, free, broker))
            for move in self._walk.moves(process, free, broker)
        )

    def _out_of_it(self, process: Process, database: Database, broker: Broker) -> bool:
        """Whether its steps will be the same whenever it takes them."""
        if database.lock is not None and database.lock.label == process.label:
            return False
        overtaken = process.owner > 0 and database.owner != process.owner
        match process.doing:
            case "claim":
                if process.write is WriteState.DECIDED and database.label_of(process.ours) is None:
                    return False
                return overtaken or 0 < self._walk.most <= database.incarnation
            case "close":
                return process.known in {None, NOTHING} or database.label_of(process.known) is not None
        if process.engine is Engine.NATIVE and process.doing == "know_end":
            return overtaken and process.todo > 0  # with nothing left to do, it may record what it finds
        asks = process.doing in _ASKING and process.producer is not ProducerState.DOUBTFUL
        return overtaken and process.doing in _OWNING and (not asks or self._fenced(process, broker))

    def _fenced(self, process: Process, broker: Broker) -> bool:
        """Whether the owner's Kafka id is at rest under a later epoch, from which no way leads on for it."""
        known = transaction(broker, self._walk.rules.kafka_id(process.incarnation))
        if process.engine is Engine.NATIVE:
            # Under the next epoch, the end of its own one may be answered as a repetition.
            return (
                self._refuses_for_ever
                and known is not None
                and known.state in _AT_REST
                and known.producer_id == process.producer_id
                and known.producer_epoch > process.epoch + 1
                and not any(_is_open_under(broker, place, process.producer_id, process.epoch) for place in PLACES)
            )
        return (
            self._refuses_for_ever
            and known is not None
            and known.state in _AT_REST
            and known.producer_id == process.producer_id
            and known.producer_epoch > process.epoch
            and known.last_producer_epoch != process.epoch  # else it may still ask for the next one
        )

    @staticmethod
    def refused(request: sim.Request, broker: Broker) -> bool:
        """Whether the broker refuses the request, now and later."""
        match request:
            case sim.AddPartitionsToTxn() | sim.EndTxn():
                known = transaction(broker, request.transactional_id)
                return known is None or (known.producer_id, known.producer_epoch) > (
                    request.producer_id,
                    request.producer_epoch,
                )
            case sim.Produce():
                entry = producer(partition(broker, request.partition), request.producer_id)
                if entry is not None and entry.producer_epoch > request.producer_epoch:
                    return True
                return request.transaction_version > 1 and _refuses_native(request, broker)
        return False


def _refuses_native(request: sim.Produce, broker: Broker) -> bool:
    """Whether the leader would ask a coordinator that knows a later epoch, or has the only batch of the transaction already."""
    known = transaction(broker, request.transactional_id)
    if _is_open_under(broker, request.partition, request.producer_id, request.producer_epoch):
        return True  # each transaction writes one batch to a partition
    return known is None or (known.producer_id, known.producer_epoch) > (request.producer_id, request.producer_epoch)


def _is_open_under(broker: Broker, place: sim.TopicPartition, producer_id: int, epoch: int) -> bool:
    entry = producer(partition(broker, place), producer_id)
    return entry is not None and entry.txn_start >= 0 and entry.producer_epoch == epoch
