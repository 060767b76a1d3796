"""A `Filling` over topics that need no broker, and the rows that come out of its batches."""

from dataclasses import dataclass

from kafka.record.default_records import DefaultRecordBatch

from dualwrite.kafka.cluster import Leader, Topic
from dualwrite.kafka.native.accumulator import Filling
from dualwrite.kafka.native.produce_state import Code, Limits, ProduceCore
from dualwrite.kafka.native.records import Codec, RecordsBuilder
from dualwrite.protocol.message import Message

NOW_MS = 1_767_225_600_000
LATER = 60.0
LEADER = Leader(1, 0)
NONE = Codec()
TOPICS = {
    "t": Topic("an-id", dict.fromkeys(range(6), LEADER)),
    "one-led": Topic("another", {0: None, 1: LEADER, 2: None}),
    "none-led": Topic("a third", {0: None, 1: None}),
}


@dataclass(frozen=True)
class Settings:
    """The settings that a `Filling` reads."""

    codec: Codec = NONE
    partitioner: str = "consistent_random"
    batch_bytes: int = 1_000_000
    batch_messages: int = 1_000_000
    max_message_bytes: int = 1_000_000
    queue_bytes: int = 1_000_000
    queue_messages: int = 100_000
    sticky_s: float = 0.01


def core(settings):
    """A core that knows the topics' leaders."""
    made = ProduceCore(
        Limits(linger_s=1.0),
        lambda: RecordsBuilder(settings.codec, limit_bytes=settings.batch_bytes, limit_records=settings.batch_messages),
    )
    for name, topic in TOPICS.items():
        made.learn(name, dict.fromkeys(topic.leaders, 1))
    return made


def filling(settings=None, *, look_up=lambda name, _fresh: TOPICS.get(name)):
    """A `Filling` and its core."""
    settings = settings or Settings()
    made = core(settings)
    return Filling(made, settings, look_up, clock=lambda: 0.0, clock_ms=lambda: NOW_MS), made


def append(to, topic, value, key=None, *, now=0.0, **parts):
    """Check one message, and take it, as `tx.produce` and the engine do."""
    to.append(Message.checked(topic, value, key, max_bytes=to._settings.max_message_bytes, **parts), now=now)


def flushed(made):
    """By topic and partition, the rows of its batches: value, key, headers, timestamp. Everything is acknowledged."""
    found = {}
    while not made.is_flushed:
        for request in list(made.requests(LATER, flush=True)):
            for where, batch in request.batches.items():
                rows = DefaultRecordBatch(batch.body.sealed(1, 1, batch.sequence))
                found.setdefault(where, []).extend((row.value, row.key, row.headers, row.timestamp) for row in rows)
            made.answered(request, dict.fromkeys(request.batches, (Code.NONE, 0)), LATER)
    return found
