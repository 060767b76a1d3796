"""The names of all spans, attributes and metrics, as tables. Where OpenTelemetry's conventions have a name, it is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

WRITER: Final = "dualwrite.writer"
TRANSACTIONAL_ID: Final = "dualwrite.transactional_id"
OUTCOME: Final = "dualwrite.outcome"
PHASE: Final = "dualwrite.phase"
LANE_STATE: Final = "dualwrite.lane.state"
SETTLEMENT: Final = "dualwrite.settlement"
LOSS: Final = "dualwrite.loss"
SETTLED_IDS: Final = "dualwrite.settled.ids"
ROLLED_FORWARD: Final = "dualwrite.settled.rolled_forward"
RETIRED: Final = "dualwrite.settled.retired"
REPAIRED: Final = "dualwrite.settled.repaired"
ERROR: Final = "error.type"
MESSAGING_SYSTEM: Final = "messaging.system"
DESTINATION: Final = "messaging.destination.name"
MESSAGING_OPERATION: Final = "messaging.operation.name"
MESSAGING_TYPE: Final = "messaging.operation.type"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
DATABASE_SYSTEM: Final = "db.system.name"
DATABASE_OPERATION: Final = "db.operation.name"

ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        WRITER: "the writer's transactional id; in metrics, `other` after the first 100 of a process",
        TRANSACTIONAL_ID: "the id of the lane, `orders#1`; in spans only",
        OUTCOME: "`committed`, `waiting`, `aborted`, `fenced`, `in doubt`, `completion pending`, `lost`, `unverifiable`, "
        "`not begun`",
        PHASE: "`lane`, `begin`, `body`, `prepare`, `record`, `decide`, `complete`, `abort`",
        LANE_STATE: "`used`, `idle`, `unsettled`",
        SETTLEMENT: "`rolled forward`, `retired`, `repaired`",
        LOSS: "`lost`, `unverifiable`, `went back`",
        SETTLED_IDS: "the number of ids that were claimed",
        ROLLED_FORWARD: "how many decided transactions were committed in Kafka",
        RETIRED: "how many Kafka ids were made unusable, which aborts what was open there",
        REPAIRED: "how many ids needed markers that a broker had forgotten",
        ERROR: "the class of the error that ended it; absent if there was none",
        MESSAGING_SYSTEM: "`kafka`",
        DESTINATION: "the topic",
        MESSAGING_OPERATION: "`send` or `commit_transaction`",
        MESSAGING_TYPE: "`send`",
        MESSAGE_COUNT: "how many messages of that topic were handed to the producer",
        DATABASE_SYSTEM: "`postgresql`, `mysql`, `mariadb` or `sqlite`, as in the engine's URL",
        DATABASE_OPERATION: "`COMMIT`",
    }
)


@dataclass(frozen=True)
class Span:
    """One kind of span. In its name, ``{topic}`` stands for a topic; `stands_for` is the time that it covers."""

    name: str
    kind: str
    stands_for: str
    attributes: tuple[str, ...]


DUAL_WRITE: Final = Span(
    "dual_write",
    "INTERNAL",
    "one block, from its wait for a lane to its end; current in the block, so that spans of your statements are its children",
    (WRITER, TRANSACTIONAL_ID, OUTCOME, ERROR),
)
SEND: Final = Span(
    "send {topic}",
    "PRODUCER",
    "all messages of one block to one topic, from the first `produce` until all are acknowledged; a child of `dual_write`",
    (MESSAGING_SYSTEM, DESTINATION, MESSAGING_OPERATION, MESSAGING_TYPE, MESSAGE_COUNT, ERROR),
)
COMMIT: Final = Span(
    "COMMIT",
    "CLIENT",
    "the decision: the database's commit, until its outcome is known; a child of `dual_write`",
    (DATABASE_SYSTEM, DATABASE_OPERATION, ERROR),
)
COMPLETE: Final = Span(
    "commit_transaction",
    "CLIENT",
    "the completion: Kafka's commit, where there is something to commit; a child of `dual_write`",
    (MESSAGING_SYSTEM, MESSAGING_OPERATION, ERROR),
)
SETTLE: Final = Span(
    "settle",
    "INTERNAL",
    "ids were claimed, and what their former owners left is settled: at opening, in the background, in a block, by `recover`",
    (SETTLED_IDS, ROLLED_FORWARD, RETIRED, REPAIRED, ERROR),
)
RECOVER: Final = Span("recover", "INTERNAL", "one `recover(...)`; the parent of its `settle` spans", (ERROR,))
SPANS: Final = (DUAL_WRITE, SEND, COMMIT, COMPLETE, SETTLE, RECOVER)


class Instrument(Enum):
    """The kinds of instruments."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"
    UP_DOWN_COUNTER = "up-down counter"


@dataclass(frozen=True)
class Metric:
    """One metric."""

    name: str
    instrument: Instrument
    unit: str
    description: str
    attributes: tuple[str, ...] = (WRITER,)


DURATION: Final = Metric(
    "dualwrite.duration",
    Instrument.HISTOGRAM,
    "s",
    "Duration of a dual write, its user's code included",
    (WRITER, OUTCOME),
)
PHASE_DURATION: Final = Metric(
    "dualwrite.phase.duration", Instrument.HISTOGRAM, "s", "Duration of one phase of a dual write", (WRITER, PHASE)
)
WRITES: Final = Metric(
    "dualwrite.writes", Instrument.COUNTER, "{dual_write}", "Dual writes that have ended", (WRITER, OUTCOME)
)
GROUP_UNITS: Final = Metric(
    "dualwrite.group.units", Instrument.HISTOGRAM, "{unit}", "Units of work that a group of `submit` has run"
)
SENT: Final = Metric(
    "messaging.client.sent.messages",
    Instrument.COUNTER,
    "{message}",
    "Messages handed to the producer",
    (MESSAGING_SYSTEM, DESTINATION, MESSAGING_OPERATION),
)
FALLBACKS: Final = Metric(
    "dualwrite.outbox.fallbacks", Instrument.COUNTER, "{change}", "How often blocks turned to waiting rows"
)
OUTBOX_SENT: Final = Metric(
    "dualwrite.outbox.sent", Instrument.COUNTER, "{message}", "Messages that had waited in the database, and were sent"
)
OUTBOX_ASIDE: Final = Metric(
    "dualwrite.outbox.aside", Instrument.COUNTER, "{message}", "Messages that Kafka refuses, moved aside"
)
LOSSES: Final = Metric("dualwrite.losses", Instrument.COUNTER, "{transaction}", "Losses that were reported", (LOSS,))
SETTLED: Final = Metric(
    "dualwrite.settled", Instrument.COUNTER, "{transaction}", "Transactions that settling has ended", (SETTLEMENT,)
)
READY: Final = Metric("dualwrite.ready", Instrument.GAUGE, "1", "1 if the writer is ready, else 0")
LANES: Final = Metric("dualwrite.lane.count", Instrument.UP_DOWN_COUNTER, "{lane}", "Lanes", (WRITER, LANE_STATE))
LANES_MAX: Final = Metric(
    "dualwrite.lane.max", Instrument.UP_DOWN_COUNTER, "{lane}", "The maximum number of lanes in use"
)
WAITING: Final = Metric(
    "dualwrite.lane.pending_requests", Instrument.UP_DOWN_COUNTER, "{request}", "Dual writes that wait for a lane"
)
UNSETTLED_TIME: Final = Metric(
    "dualwrite.lane.unsettled_time", Instrument.GAUGE, "s", "Age of the oldest lane that is not settled; 0 if all are"
)
OPEN_TIME: Final = Metric(
    "dualwrite.transaction.open_time",
    Instrument.GAUGE,
    "s",
    "Age of the oldest dual write that holds a lane; 0 if none does",
)
KAFKA_OPEN_TIME: Final = Metric(
    "dualwrite.kafka.open_time",
    Instrument.GAUGE,
    "s",
    "Age of the oldest transaction open in Kafka, of any program; 0 if none is; absent while unknown",
)
TIME_LEFT: Final = Metric(
    "dualwrite.transaction.time_left",
    Instrument.GAUGE,
    "s",
    "Time until the broker aborts the next of the open transactions; absent while none has a time limit",
)
OUTBOX_LATER: Final = Metric(
    "dualwrite.outbox.later",
    Instrument.GAUGE,
    "1",
    "1 while messages wait in the database and are sent later, else 0; absent without an outbox",
)
OUTBOX_ROWS: Final = Metric(
    "dualwrite.outbox.rows", Instrument.GAUGE, "{message}", "Messages that wait in the database; of many an estimate"
)
OUTBOX_BYTES: Final = Metric(
    "dualwrite.outbox.bytes", Instrument.GAUGE, "By", "The bytes of their keys, values and headers"
)
OUTBOX_AGE: Final = Metric(
    "dualwrite.outbox.age", Instrument.GAUGE, "s", "For how long the oldest of them has waited; 0 if none does"
)
OUTBOX_FULL: Final = Metric(
    "dualwrite.outbox.full",
    Instrument.GAUGE,
    "1",
    "1 while a bound is reached, so that no more messages may wait, else 0; absent without an outbox",
)
OUTBOX_STOPPED: Final = Metric(
    "dualwrite.outbox.stopped",
    Instrument.GAUGE,
    "1",
    "1 while all of them wait for one that Kafka refuses, or for a person after the database has lost a commit, else 0; "
    "absent without an outbox",
)
METRICS: Final = (
    DURATION,
    PHASE_DURATION,
    WRITES,
    GROUP_UNITS,
    SENT,
    FALLBACKS,
    OUTBOX_SENT,
    OUTBOX_ASIDE,
    LOSSES,
    SETTLED,
    READY,
    LANES,
    LANES_MAX,
    WAITING,
    UNSETTLED_TIME,
    OPEN_TIME,
    TIME_LEFT,
    KAFKA_OPEN_TIME,
    OUTBOX_LATER,
    OUTBOX_ROWS,
    OUTBOX_BYTES,
    OUTBOX_AGE,
    OUTBOX_FULL,
    OUTBOX_STOPPED,
)
# The bounds of the histograms' buckets that are proposed to the SDK, in seconds.
BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Likewise, for numbers of units.
BUCKETS_UNITS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
