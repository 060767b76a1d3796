"""Sends the messages of one producer's transactions, on connections of its own, in the thread that uses it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Final

from dualwrite.clock import Deadline, now_s
from dualwrite.errors import DualWriteError
from dualwrite.kafka.brokers import Connections, NotYet, until_known
from dualwrite.kafka.cluster import Topic, Topics
from dualwrite.kafka.messages import Done, Produce, TopicKey
from dualwrite.kafka.native.produce_state import Delivered, Partition, ProduceCore, ToSend

logger = logging.getLogger("dualwrite.kafka.producer")

_LOOK_UP_AGAIN_S: Final = 0.02
_LOOK_UP_S: Final = 5.0
_SERVE_AFTER_S: Final = 0.001
_REFRESH_S: Final = 300.0
"""After this time a topic is looked up again: it may have more partitions. As librdkafka's and Java's default."""


class Sender:
    """Connects a :class:`ProduceCore` to the brokers. Used by one thread at a time.

    There is no background thread: nothing is sent or received between calls. Call :meth:`pump` regularly.
    """

    def __init__(self, brokers: Connections, kafka_id: str) -> None:
        self._id = kafka_id
        self.brokers = brokers  # for this thread's other requests, too
        self._topics = Topics(brokers)
        self._written: dict[str, Topic] = {}
        self.topic_ids: dict[str, str] = {}  # of each topic that the transaction writes to
        self._known: dict[str, tuple[Topic, TopicKey, Mapping[int, int | None]]] = {}
        self._found_at: dict[str, float] = {}
        self._ids = (-1, -1)
        self._core: ProduceCore | None = None
        self._looked_up_at = self._served_at = 0.0
        self.delivered: list[Delivered] = []

    def begin(self, ids: tuple[int, int], core: ProduceCore) -> None:
        """Send the messages of this core from now on, under this producer id and epoch."""
        self._ids, self._core = ids, core
        self._written, self.topic_ids = {}, {}
        self.delivered = []

    def topic(self, name: str, deadline: Deadline, *, fresh: bool = False) -> Topic | None:
        """The topic with its partitions; None if there is none. Unchanged throughout a transaction, unless ``fresh``."""
        if not fresh and (known := self.known(name)) is not None:
            return known
        fresh = fresh or name not in self._found_at or now_s() >= self._found_at[name] + _REFRESH_S
        found = None if fresh else self._topics.known(name)
        if found is None:
            found = self._found(name, deadline, fresh=fresh)
        if found is not None:
            if fresh:
                self._found_at[name] = now_s()
            self._learn(name, found)
        return found

    def known(self, name: str) -> Topic | None:
        """The topic, if no broker need be asked for it: as the last look-up has shown it, maybe in a former transaction."""
        if name in self._written:
            return self._written[name]
        known = self._known.get(name)
        if (
            known is None
            or known[0] is not self._topics.known(name)
            or now_s() >= self._found_at.get(name, 0.0) + _REFRESH_S
        ):
            return None
        assert self._core is not None
        self._note_written(name, known[0], known[2])
        return known[0]

    def has_found(self, name: str) -> bool:
        """Whether the topic was ever found. Asks no broker."""
        return name in self._found_at

    def finds(self, name: str, deadline: Deadline) -> bool:
        """Whether the topic is found now. Unlike :meth:`topic`, also between two transactions."""
        found = self._found(name, deadline, fresh=True)
        if found is not None:
            self._found_at[name] = now_s()
        return found is not None

    def _found(self, name: str, deadline: Deadline, *, fresh: bool) -> Topic | None:
        def ask() -> Topic | NotYet | None:
            return self._topics.find([name], deadline, fresh=fresh)[name]

        return until_known(ask, deadline, f"describe topic {name!r}")

    def ids_of(self, names: Collection[str], deadline: Deadline) -> dict[str, bytes]:
        """The ids of topics that the transaction need not write to, as they were when first looked at, until :meth:`forget`.

        A topic is left out if it is not found, has no id, or may not be described, or if no broker tells in time.
        """
        try:
            found = self._topics.find(names, deadline, fresh=False)
        except (NotYet, DualWriteError) as error:
            logger.debug("%s: no broker tells the ids of %s: %s", self._id, ", ".join(sorted(names)), error)
            return {}
        return {name: _raw(one.topic_id) for name, one in found.items() if isinstance(one, Topic) and one.topic_id}

    def forget(self, names: Collection[str]) -> None:
        """Look these topics up again before their next use: one of them may have been made again under its name."""
        self._topics.forget(names)

    def _learn(self, name: str, topic: Topic) -> None:
        assert self._core is not None
        former = self._written.get(name, topic)
        # Messages that no partition has taken may go to the new topic, if each would go to the same partition there.
        alike = former.leaders.keys() == topic.leaders.keys() and not self._core.may_have_written(name)
        if former.topic_id != topic.topic_id and not alike:
            self._core.note_recreated(name)
            return
        known = self._known.get(name)
        if known is None or known[0] is not topic:
            topic_id = bytes(16) if topic.topic_id is None else _raw(topic.topic_id)
            nodes = {number: None if lead is None else lead.node for number, lead in topic.leaders.items()}
            known = self._known[name] = (topic, TopicKey.of(name, topic_id), nodes)
        self._note_written(name, topic, known[2])

    def _note_written(self, name: str, topic: Topic, leaders: Mapping[int, int | None]) -> None:
        assert self._core is not None
        self._written[name] = topic
        self.topic_ids[name] = topic.topic_id or ""
        self._core.learn(name, leaders)

    def pump(self) -> None:
        """Send what may be sent now, and take the answers that are there. Does not wait.

        Looks into the sockets only if the last look, or the first request since, is a millisecond old.
        """
        core = self._core
        if core is None or not (core.to_send or core.in_flight):
            return
        now, in_flight = now_s(), core.in_flight
        for request in core.requests(now):
            self.brokers.post(*self._posted(core, request))
        if not in_flight:
            self._served_at = now
        elif now >= self._served_at + _SERVE_AFTER_S:
            self._serve(0)

    def wait(self, deadline: Deadline) -> None:
        """Send what may be sent, and wait for an answer, or for the next thing to do."""
        assert self._core is not None
        self._prepare_to_send(deadline)
        self._wait(self._core, deadline.remaining_s())

    def flush(self, deadline: Deadline) -> bool:
        """Send everything, and wait for the acknowledgements.

        Returns False if the core was refused, or the deadline has come.
        """
        core = self._core
        assert core is not None
        while core.queued_messages and core.refusal is None and (left_s := deadline.remaining_s()):
            if core.to_send or core.outdated or now_s() >= core.give_up_at:
                self._prepare_to_send(deadline)
                left_s = deadline.remaining_s()
            if core.queued_messages and core.refusal is None:
                self._wait(core, left_s)
        return not core.queued_messages

    def _prepare_to_send(self, deadline: Deadline) -> None:
        core = self._core
        assert core is not None
        now = now_s()
        if now >= core.give_up_at:
            core.give_up(now)
        if core.outdated and now >= self._looked_up_at + _LOOK_UP_AGAIN_S:
            self._look_up(deadline)
            now = now_s()
        for request in core.requests(now, flush=True):
            self.brokers.post(*self._posted(core, request))

    def drain(self, deadline: Deadline) -> None:
        """Wait for the answers to what was sent, after a refusal: the fewer are missing, the more is known."""
        while self._core is not None and self._core.in_flight and not deadline.expired:
            self._serve(deadline.remaining_s())

    def _serve(self, seconds: float) -> None:
        self.brokers.serve(seconds)
        self._served_at = now_s()

    def close(self) -> None:
        """Close the connections."""
        self.brokers.close()

    def _wait(self, core: ProduceCore, seconds: float) -> None:
        # With everything in flight there is nothing to do before an answer comes, or a batch has waited for too long.
        at = core.next_at() if core.to_send else core.give_up_at
        if at is not None:
            seconds = min(seconds, max(0.0, at - now_s()))
        if core.outdated:
            seconds = min(seconds, _LOOK_UP_AGAIN_S)
        self.brokers.serve(seconds)
        self._served_at = now_s()

    def _look_up(self, deadline: Deadline) -> None:
        assert self._core is not None
        names = sorted(self._core.outdated)
        try:
            found = self._topics.find(names, Deadline(min(_LOOK_UP_S, deadline.remaining_s())), fresh=True)
        except NotYet as reason:
            logger.debug("%s: no broker describes %s: %s", self._id, ", ".join(names), reason)
            found = {}
        for name, topic in found.items():
            if isinstance(topic, NotYet):
                continue
            if topic is None:
                self._core.note_missing(name, now_s())
            else:
                self._learn(name, topic)
        self._looked_up_at = now_s()

    def _posted(self, core: ProduceCore, request: ToSend) -> tuple[int, Produce, Done]:
        """The request as it is posted: to which broker, its message, and what takes the answer."""
        producer_id, epoch = self._ids
        by_topic: dict[str, tuple[TopicKey, list[tuple[int, bytes]]]] = {}
        for (topic, number), batch in request.batches.items():
            sealed = batch.body.sealed(producer_id, epoch, batch.sequence)
            of_topic = by_topic.get(topic)
            if of_topic is None:
                by_topic[topic] = (self._known[topic][1], [(number, sealed)])
            else:
                of_topic[1].append((number, sealed))
        produce = Produce(self._id, list(by_topic.values()), round(core.limits.replicas_s * 1000))
        return request.node, produce, partial(self._take, core, request)

    def _take(
        self, core: ProduceCore, request: ToSend, answer: Mapping[Partition, tuple[int, int]] | Exception
    ) -> None:
        if isinstance(answer, Exception):
            logger.debug("%s: a Produce to broker %d has no answer: %s", self._id, request.node, answer)
            core.unanswered(request, now_s())
            return
        # A late answer to an earlier transaction's request belongs to that transaction's core.
        delivered = core.answered(request, answer, now_s())
        if core is self._core:
            self.delivered += delivered


def _raw(topic_id: str) -> bytes:
    return base64.urlsafe_b64decode(topic_id + "==")
