"""What a dead owner left behind: `dualwrite.recovery` settles it, then its waiting messages are sent.

Sending is a dual write, which needs a lane; so `recover` is here, above both, as is what live members of a fleet do for dead
ones. Before sending for another writer, it claims all of that writer's lanes: then the former owner can no longer decide
anything, neither directly nor as rows, and sends nothing that waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dualwrite.clock import Deadline
from dualwrite.interfaces import NO_OBSERVER, Observer
from dualwrite.kafka.config import KafkaConfig
from dualwrite.protocol.values import (
    DEFAULT_LIMITS,
    OutboxMode,
    Waiting,
    check_seconds,
    check_selection,
    outbox_id,
    writer_of,
)
from dualwrite.recovery import operator
from dualwrite.recovery.claim import OwnerContext, claim_every_lane, settle_lanes, unique_owner
from dualwrite.recovery.recover import (
    RecoveryReport,
    connected_coordinator,
    open_for_s_of,
    recover_ids,
    rows_of,
)
from dualwrite.stores.sql.database import opened
from dualwrite.telemetry import observer_if_loaded
from dualwrite.writing.lane import Lane, Losses
from dualwrite.writing.outbox import Outbox
from dualwrite.writing.sender import Sending, send_all
from dualwrite.writing.writer_resources import ProducerSettings, lane_producer

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Database
    from dualwrite.protocol.values import StateRow, WhenRefused

logger = logging.getLogger(__name__)


def recover(
    transactional_id: str | None = None,
    *,
    kafka: Mapping[str, object],
    database: Engine | Database | str,
    schema: str | None = None,
    prefix: str | None = None,
    open_for_s: float | None = None,
    dry_run: bool = False,
    after_restore: bool = False,
    timeout_s: float = 300.0,
    progress: Callable[[int, int], None] | None = None,
    telemetry: Observer | None = None,
) -> RecoveryReport:
    """Settle what dead owners left behind: commit in Kafka what the database decided, abort the rest, send what waits.

    May be called at any time, by any number of processes at once. Settles a writer with all its lanes, or not at all. This
    fences an owner that is still alive: its open transactions abort on both sides, and it must open its writer again.

    Messages that wait in the database are sent, in order, and the mode becomes direct again. A message that Kafka refuses for
    good is moved aside.

    Args:
        transactional_id: One writer's id, with its lanes; not together with ``prefix``.
        kafka: librdkafka configuration. Its ``client.id`` names this recovery to people who read the rows.
        database: A SQLAlchemy engine or a database URL.
        schema: The database schema of the library's tables.
        prefix: All ids with this prefix; all ids if neither is given.
        open_for_s: Leave alone writers that have begun a Kafka transaction, or prepared one in the database, less than this
            many seconds ago: their owner may be alive. By default 0 for one id, and 60 for several. Unless it is 0, also leave
            alone ids with something undecided whose lease has not expired: those of live members of fleets, and slots, whose
            tasks leave what they have prepared to the driver.
        dry_run: Report what would be done, and change nothing.
        after_restore: The database was restored, and Kafka may show newer messages: continue above every incarnation that Kafka
            knows, and abort what is open there. This includes lanes and writers of the id or the prefix that are younger than
            the backup, and so have no row. Without an id or a prefix, it includes only lanes, of writers that have a row.
        timeout_s: Limits the whole call, in seconds.
        progress: Called with the number of ids settled so far, and of those to settle. The first call comes before any is
            settled. Several threads call it, one at a time.
        telemetry: As for `DualWriter`.

    Returns:
        The report. On return, except for what was left alone, everything decided is complete in Kafka or is among the losses,
        and no message waits.

    Raises:
        ConfigurationError: An argument cannot be used: an empty id or prefix, a time that is NaN or infinite; or the
            tables, a row, the cluster or a right is not as required.
        Unavailable: A server does not answer in time; run it again.

    Source: KIP-939, "recovery recipe".
    """
    check_selection(transactional_id, prefix)
    check_seconds("timeout_s", timeout_s)
    if open_for_s is not None:
        check_seconds("open_for_s", open_for_s, zero=True)
    deadline, left_alone_s = Deadline(timeout_s), open_for_s_of(open_for_s, transactional_id)
    observer = observer_if_loaded() if telemetry is None else telemetry
    with observer.recovering(), opened(database, schema) as used:
        report = recover_ids(
            used,
            transactional_id,
            prefix,
            kafka=kafka,
            open_for_s=left_alone_s,
            dry_run=dry_run,
            after_restore=after_restore,
            deadline=deadline,
            progress=progress,
            observer=observer,
        )
        store = used.store()
        if store.outbox is None:
            return report
        rows = rows_of(store, transactional_id, prefix)
        claimed = {
            writer_of(settled) for settled in report.settled
        }  # by us, just now: so their rows are young, but that is no sign of an owner
        for name in sorted({writer_of(row.transactional_id) for row in rows}):
            waiting = store.outbox.waiting(name).rows
            if not waiting and (transactional_id is None or store.outbox_mode(name) is OutboxMode.DIRECT):
                continue
            if name in report.skipped or any(name == one.transactional_id for one in report.went_back):
                continue
            if left_alone_s and _may_be_alive(name, rows, used, None if name in claimed else left_alone_s):
                report.skipped.append(name)
            elif dry_run:
                report.sent[name] = waiting
            else:
                report.sent[name] = send_for(name, kafka=kafka, database=used, deadline=deadline, observer=observer)
    return report


class Waits(NamedTuple):
    """What waits of one writer in the database, and how much was moved aside."""

    writer: str
    mode: OutboxMode
    waiting: Waiting
    aside: int


def what_waits(database: Database, writers: Collection[str]) -> Sequence[Waits]:
    """What waits of these writers. Leaves out writers of which nothing waits."""
    store = database.store()
    if store.outbox is None:
        return ()
    found = []
    for name in sorted(writers):
        waiting, aside = store.outbox.waiting(name), store.outbox.count_aside(name)
        mode = store.outbox_mode(name)
        if waiting.rows or aside or mode is OutboxMode.LATER:
            found.append(Waits(name, mode, waiting, aside))
    return found


def _may_be_alive(name: str, rows: Sequence[StateRow], database: Database, left_alone_s: float | None) -> bool:
    """Whether the owner changed a row of its writer a short time ago, or holds a lease. A live owner sends by itself.

    ``left_alone_s`` is None if the rows were changed by us.
    """
    if left_alone_s is not None:
        newest = max(row.updated_at.timestamp() for row in rows if writer_of(row.transactional_id) == name)
        if database.now().timestamp() - newest < left_alone_s:
            return True
    return bool(database.living([name]))


def take_over(
    transactional_id: str,
    *,
    kafka: Mapping[str, object],
    database: Database,
    timeout_s: float,
    owner: str | None,
    observer: Observer,
    when_refused: WhenRefused,
) -> RecoveryReport:
    """As :func:`recover` for one writer, but claims it even if its owner left nothing.

    From then on, an owner that was only paused can begin no transaction, and a late request of a dead one opens none.
    """
    deadline = Deadline(timeout_s)
    report = operator.take_over(
        transactional_id, kafka=kafka, database=database, deadline=deadline, owner=owner, observer=observer
    )
    store = database.store()
    if not report.went_back and store.outbox_mode(transactional_id) is OutboxMode.LATER:
        report.sent[transactional_id] = send_for(
            transactional_id,
            kafka=kafka,
            database=database,
            deadline=deadline,
            observer=observer,
            owner=owner,
            when_refused=when_refused,
        )
    return report


def send_for(
    writer: str,
    *,
    kafka: Mapping[str, object],
    database: Database,
    deadline: Deadline,
    observer: Observer = NO_OBSERVER,
    owner: str | None = None,
    when_refused: WhenRefused = "aside",
) -> int:
    """Claim a writer whose owner is gone, send what it left waiting, and turn its mode back to direct.

    Returns how many messages were sent. Raises `Unavailable` if something still waits: Kafka did not answer, or time ran out.
    """
    config = KafkaConfig.parse(kafka)
    settings = ProducerSettings(replace(config, bulk=True), DEFAULT_LIMITS.timeout_s)
    with connected_coordinator(kafka) as coordinator:
        context = OwnerContext(coordinator, database.store(), unique_owner(owner or config.client_id), observer)
        rows = claim_every_lane(context, writer, 1, deadline, outbox=True)
        settle_lanes(context, rows.values(), deadline)
        lane = Lane(
            outbox_id(writer),
            context,
            lambda row: lane_producer(settings, context, row),
            guard=lambda: (writer, rows[writer].incarnation),
            losses=Losses(observer=observer),
        )
        lane.adopt(rows[lane.transactional_id])
        sending = Sending(
            writer,
            lane,
            context,
            database,
            Outbox(writer, observer),
            turns_back=True,
            when_refused=when_refused,
            margin_s=DEFAULT_LIMITS.margin_s,
            timeout_s=DEFAULT_LIMITS.timeout_s,
        )
        try:
            return send_all(sending, writer, deadline)
        finally:
            sending.close()
