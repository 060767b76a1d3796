"""The commands' output: a table for people, one JSON document for scripts. Neither shows a secret."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualwrite.protocol.batches import outlook
from dualwrite.protocol.blocking import Blocker, counted, number_ranges
from dualwrite.protocol.members import Lease, place_of
from dualwrite.protocol.prepared_state import Engine
from dualwrite.protocol.settle import SettleStep
from dualwrite.protocol.values import (
    AsideMessage,
    Incident,
    OutboxMode,
    TransactionStatus,
    Waiting,
    belongs,
    pool_of_sink,
    writer_of,
)
from dualwrite.recovery.recover import Forgotten, IdStatus, RecoveryReport
from dualwrite.recovery.settle import Loss
from dualwrite.stores.sql.ledger import Batch, UnfinishedBatch
from dualwrite.writing.left_behind import Waits

_WIDTH_OF_A_PIPE = 400

_WILL = {
    SettleStep.WAIT: "wait for Kafka",
    SettleStep.COMMIT: "commit: the database has decided",
    SettleStep.RECORD_COMMITTED: "nothing: committed",
    SettleStep.RECORD_LOST: "report a LOSS: decided, but the broker aborted it",
    SettleStep.RECORD_UNVERIFIABLE: "report: outcome cannot be known",
    SettleStep.REPAIR_MARKERS: "commit where the broker has left it open: the database has decided",
    SettleStep.FINISH: "nothing",
}


def report_console() -> Console:
    """Standard output, as wide as the terminal; lines for a pipe or a file are never wrapped."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_PIPE)


def will_do(item: IdStatus) -> str:
    """Say what settling would do."""
    if item.claim_lost:
        return "nothing: the database has gone back in time, or a copy is in use; compare both, then recover --after-restore"
    in_kafka = _will_do_in_kafka(item)
    if item.went_back is not None:
        return f"report that the database has gone back in time; {in_kafka}"
    if item.prepared_for_s is None or in_kafka == _WILL[SettleStep.COMMIT]:
        return in_kafka
    decided = row_word(item) != "-"
    in_database = "commit in the database" if decided else "roll back in the database: undecided"
    return in_database if in_kafka.startswith("nothing") else f"{in_kafka}; {in_database}"


def _will_do_in_kafka(item: IdStatus) -> str:
    if item.open_for_s is not None and item.step in {SettleStep.RETIRE, SettleStep.RECORD_COMMITTED}:
        return "abort: undecided"  # the row names an earlier one
    if item.open_for_s is not None and item.step in {SettleStep.RECORD_LOST, SettleStep.RECORD_UNVERIFIABLE}:
        return f"{_WILL[item.step]}; abort what is open since: undecided"
    if item.step is SettleStep.RETIRE:
        if row_word(item) == "decided":
            return _WILL[SettleStep.REPAIR_MARKERS]
        return "end what the broker may have left open of it" if item.needs_recovery else "nothing: idle"
    return _WILL.get(item.step, str(item.step.value))


def plain_table(*columns: str) -> Table:
    """A table without lines, whose columns wrap."""
    table = Table(title=None, box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def status_table(items: Sequence[IdStatus]) -> Table:
    """The table of ``dualwrite status``."""
    shows_prepared = any(item.prepared_for_s is not None for item in items)
    prepared = ["prepared for"] if shows_prepared else []
    shows_engine = any(_engine_word(item) == Engine.NATIVE.value for item in items)
    engine = ["engine"] if shows_engine else []
    table = plain_table(
        "transactional id",
        "incarnation",
        "row",
        *engine,
        "Kafka",
        "open for",
        "aborted in",
        *prepared,
        "owner",
        "recovery would",
    )
    for item in items:
        table.add_row(
            item.row.transactional_id,
            f"{item.incarnation} of {item.row.incarnation}",
            row_word(item),
            *([_engine_word(item)] if shows_engine else []),
            item.kafka_status.value,
            _seconds(item.open_for_s),
            "never" if item.open_for_s is not None and item.aborted_in_s is None else _seconds(item.aborted_in_s),
            *([_seconds(item.prepared_for_s)] if shows_prepared else []),
            item.row.owner,
            will_do(item),
            style="bold" if item.needs_recovery else None,
        )
    return table


def summary(items: Sequence[IdStatus], longest_s: float | None, open_incidents: int) -> str:
    """The last line of ``dualwrite status``. ``longest_s`` is the age of the oldest open transaction, a row's or not."""
    parts = [
        f"{len(items)} ids",
        f"{sum(item.needs_recovery for item in items)} to recover",
        f"{open_incidents} losses not acknowledged",
    ]
    if longest_s is not None:
        parts.append(f"longest open {_seconds(longest_s)}")
    if unlimited := sum(item.has_no_time_limit is True for item in items):
        parts.append(f"{unlimited} without a time limit")
    return ", ".join(parts)


def _seconds(seconds: float | None, digits: int = 0) -> str:
    return "" if seconds is None else f"{seconds:.{digits}f} s"


def _engine_word(item: IdStatus) -> str:
    return item.row.prepared.engine.value if belongs(item.row.prepared, item.incarnation) else ""


def row_word(item: IdStatus) -> str:
    """What the row says of that incarnation: ``decided``, the outcome that is recorded, or ``-``."""
    if not belongs(item.row.prepared, item.incarnation):
        return "-"
    return item.row.completed.value if item.row.completed else "decided"


def status_json(item: IdStatus) -> dict[str, object]:
    """One id as ``dualwrite status --json`` shows it."""
    return {
        "transactional_id": item.row.transactional_id,
        "incarnation": item.incarnation,
        "current_incarnation": item.row.incarnation,
        "kafka_id": item.row.kafka_id(item.incarnation),
        "row": row_word(item),
        "engine": _engine_word(item) or None,
        "prepared_transaction_state": str(item.row.prepared),
        "kafka": item.kafka_status.value,
        "open_for_s": item.open_for_s,
        "aborted_in_s": item.aborted_in_s,
        "has_no_time_limit": item.has_no_time_limit,
        "partitions": [{"topic": topic, "partition": partition} for topic, partition in item.partitions],
        "prepared_for_s": item.prepared_for_s,
        "owner": item.row.owner,
        "updated_at": item.row.updated_at.isoformat(),
        "needs_recovery": item.needs_recovery,
        "went_back": item.went_back,
        "recovery_would": will_do(item),
    }


def lease_table(leases: Sequence[Lease]) -> Table:
    """The leases of fleets, below the table of ``dualwrite status``."""
    table = plain_table("leased id", "lease", "for", "member")
    for lease in leases:
        table.add_row(
            lease.transactional_id,
            lease.state.value,
            _seconds(None if lease.left_s is None else abs(lease.left_s)),
            _without_place(lease.owner or ""),
        )
    return table


def waiting_words(one: Waits) -> str:
    """What waits of one writer, as ``dualwrite status`` shows it."""
    words = [f"{one.writer}: mode {one.mode.value}"]
    if one.waiting.rows:
        about = "" if one.waiting.exact else "about "
        words.append(
            f"{about}{one.waiting.rows} messages of {about}{one.waiting.size} bytes wait, "
            f"the oldest for {_seconds(one.waiting.oldest_s)}"
        )
    if one.aside:
        words.append(f"{one.aside} refused by Kafka, and moved aside")
    return ", ".join(words)


def waiting_json(one: Waits) -> dict[str, object]:
    """What waits of one writer, as ``dualwrite status --json`` shows it."""
    return {
        "writer": one.writer,
        "mode": one.mode.value,
        "rows": one.waiting.rows,
        "bytes": one.waiting.size,
        "oldest_s": one.waiting.oldest_s,
        "aside": one.aside,
    }


def _without_place(owner: str) -> str:
    place = place_of(owner)
    return owner if place is None else owner.removesuffix(place.sign(""))


def lease_json(lease: Lease) -> dict[str, object]:
    """One lease as ``dualwrite status --json`` shows it."""
    return {
        "transactional_id": lease.transactional_id,
        "fleet": lease.fleet,
        "state": lease.state.value,
        "left_s": lease.left_s,
        "owner": lease.owner,
    }


MOST_SHOWN = 20


def blocker_table(blockers: Sequence[Blocker], own: Mapping[str, str]) -> Table:
    """What is open and what it blocks, below the table of ``dualwrite status``; ``own`` are the rows' ids by Kafka id."""
    table = plain_table(
        "open transaction",
        "of",
        "open for",
        "aborted in",
        "blocks",
        "consumer groups that stand still",
        "way on",
    )
    for one in blockers[:MOST_SHOWN]:
        table.add_row(
            one.kafka_id,
            own.get(one.kafka_id, f"not ours: {one.maker}"),
            _seconds(one.open_for_s),
            "never" if one.aborted_in_s is None else _seconds(one.aborted_in_s),
            blocks_words(one),
            groups_words(one),
            "as above" if one.kafka_id in own else one.way_on,
        )
    return table


def blocks_words(one: Blocker) -> str:
    """The partitions of an open transaction, and how many records wait in them."""
    places = partitions_words((held.topic, held.partition) for held in one.partitions) or "-"
    return f"{places}: {'an unknown number of records' if one.records is None else counted(one.records, 'record')}"


def groups_words(one: Blocker) -> str:
    """The consumer groups that stand still at an open transaction."""
    words = [f"{group} ({counted(records, 'record')})" for group, records in sorted(one.standing.items())]
    more = f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
    return (", ".join(words[:MOST_SHOWN]) or "-") + more


def partitions_words(partitions: Iterable[tuple[str, int]]) -> str:
    """Partitions by topic: ``orders 0-2, 5; payments 1``."""
    of_topic: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        of_topic.setdefault(topic, []).append(number)
    return "; ".join(f"{topic} {number_ranges(numbers)}" for topic, numbers in of_topic.items())


def blocker_json(one: Blocker, *, has_row: bool) -> dict[str, object]:
    """One open transaction as ``dualwrite status --json`` shows it."""
    return {
        "kafka_id": one.kafka_id,
        "ours": has_row,
        "made_by": one.maker,
        "writer": one.writer,
        "kafka": one.status.value,
        "producer_id": one.producer_id,
        "epoch": one.epoch,
        "open_for_s": one.open_for_s,
        "aborted_in_s": one.aborted_in_s,
        "records": one.records,
        "partitions": [asdict(held) for held in one.partitions],
        "groups": [asdict(group) for group in one.groups],
        "way_on": None if has_row else one.way_on,
    }


def status_document(
    items: Sequence[IdStatus],
    longest_s: float | None,
    open_incidents: Sequence[Incident],
    *,
    leases: Sequence[Lease],
    blockers: Sequence[Blocker],
    batches: Sequence[UnfinishedBatch],
    waiting: Sequence[Waits],
    warnings: Sequence[str],
) -> dict[str, object]:
    """The document of ``dualwrite status --json``."""
    own = {item.row.kafka_id(item.incarnation) for item in items}
    return {
        "ids": [status_json(item) for item in items],
        "longest_open_s": longest_s,
        "open_transactions": [blocker_json(one, has_row=one.kafka_id in own) for one in blockers],
        "incidents": [
            {
                "transactional_id": incident.transactional_id,
                "outcome": incident.outcome.value,
                "prepared_transaction_state": incident.prepared_transaction_state,
                "detail": incident.detail,
                "detected_at": incident.detected_at.isoformat(),
            }
            for incident in open_incidents
        ],
        "leases": [lease_json(lease) for lease in leases],
        "batches": [unfinished_json(one, words) for one, words in batch_outlooks(batches, items)],
        "outbox": [waiting_json(one) for one in waiting],
        "warnings": list(warnings),
    }


def batch_table(
    batches: Sequence[Batch], deserted: Mapping[tuple[str, str], datetime], *, sources: bool = False
) -> Table:
    """The table of ``dualwrite batches``, with what each batch is made of if `sources` are wanted."""
    table = plain_table("sink", "batch", "phase", "partitions")
    for column in ("rows", "messages", "MiB", "started (UTC)", "decided after", "completed after", "rows/s"):
        table.add_column(column, justify="right")
    if sources:
        table.add_column("made of", overflow="fold")
    for batch in batches:
        table.add_row(
            batch.sink,
            batch.batch_id,
            _phase(batch, deserted),
            f"{batch.written_partitions} of {batch.partition_count}",
            f"{batch.row_count:,}",
            f"{batch.message_count:,}",
            "" if batch.byte_count is None else f"{batch.byte_count / 2**20:,.1f}",
            "" if batch.started_at is None else f"{batch.started_at:%Y-%m-%d %H:%M:%S}",
            _seconds(batch.decided_after_s, 2),
            _seconds(batch.completed_after_s, 2),
            f"{batch.row_count / batch.decided_after_s:,.0f}" if batch.decided_after_s else "",
            *([Text(batch.sources or "not told")] if sources else []),
            style="bold" if batch.decided_at is None else None,
        )
    return table


def _phase(batch: Batch, deserted: Mapping[tuple[str, str], datetime]) -> str:
    since = deserted.get((batch.sink, batch.batch_id))
    return batch.phase if since is None else f"{batch.phase}, nobody at work since {since:%Y-%m-%d %H:%M:%S}"


def batch_outlooks(
    batches: Sequence[UnfinishedBatch], items: Sequence[IdStatus]
) -> Sequence[tuple[UnfinishedBatch, str]]:
    """Each batch of which anything is left, and what becomes of it."""
    unsettled = Counter(writer_of(item.row.transactional_id) for item in items if item.needs_recovery)
    found = []
    for one in batches:
        words = outlook(
            one.batch.phase,
            deserted=one.nobody_since is not None,
            unsettled=unsettled[pool_of_sink(one.batch.sink)],
        )
        if words is not None:
            found.append((one, words))
    return found


def unfinished_json(one: UnfinishedBatch, words: str) -> dict[str, object]:
    """One batch that is not completed as ``dualwrite status --json`` shows it."""
    since = {} if one.nobody_since is None else {(one.batch.sink, one.batch.batch_id): one.nobody_since}
    return {**batch_json(one.batch, since), "outlook": words}


def batch_json(batch: Batch, deserted: Mapping[tuple[str, str], datetime]) -> dict[str, object]:
    """One batch as ``dualwrite batches --json`` shows it."""
    shown = {
        **asdict(batch),
        "sources": _json_or_text(batch.sources),
        "nobody_at_work_since": deserted.get((batch.sink, batch.batch_id)),
    }
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in shown.items()}


def _json_or_text(text: str | None) -> object:
    """What the text holds if it is JSON: of a batch's sources, the job's own words may be anything."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def loss_json(loss: Loss) -> dict[str, object]:
    """One loss as ``dualwrite recover --json`` shows it."""
    return {
        "transactional_id": loss.row.transactional_id,
        "outcome": loss.outcome.value,
        "prepared_transaction_state": str(loss.row.prepared),
        "detail": loss.detail,
    }


def forgotten_words(item: Forgotten) -> str:
    """Say what a recovery after a restore would do, or did, with a Kafka id that the database had forgotten."""
    aborted = "aborted, undecided in this database" if item.settled else "would be aborted, undecided in this database"
    found = {
        TransactionStatus.ONGOING: f"a transaction was open: {aborted}",
        TransactionStatus.PREPARE_COMMIT: "its newest transaction was being committed: this database does not know it",
        TransactionStatus.COMPLETE_COMMIT: "its newest transaction is committed: this database does not know it",
    }.get(item.status, "nothing was open")
    row = "the row continues above it" if item.has_row else "younger than the backup, it has no row"
    return f"{item.kafka_id}: {found}; {row}{'; unusable from now on' if item.settled else ''}"


def recovery_json(report: RecoveryReport) -> dict[str, object]:
    """The document of ``dualwrite recover --json``."""
    return {
        "planned": [status_json(item) for item in report.planned],
        "settled": report.settled,
        "rolled_forward": report.rolled_forward,
        "skipped": report.skipped,
        "losses": [loss_json(loss) for loss in report.losses],
        "went_back": [{"transactional_id": error.transactional_id, "detail": error.what} for error in report.went_back],
        "forgotten": [
            {
                "kafka_id": item.kafka_id,
                "transactional_id": item.transactional_id,
                "incarnation": item.incarnation,
                "kafka": item.status.value,
                "has_row": item.has_row,
                "settled": item.settled,
            }
            for item in report.forgotten
        ],
    }


# Messages that wait, and those that were moved aside.


class OutboxView(NamedTuple):
    """What is known of one writer's messages: by topic as far as it was counted, and the first of those moved aside."""

    writer: str
    mode: OutboxMode
    waiting: Waiting
    topics: Mapping[str, int]
    aside_count: int
    aside: Sequence[AsideMessage]


def outbox_table(views: Sequence[OutboxView]) -> Table:
    """The first table of ``dualwrite outbox list``."""
    table = plain_table("writer", "mode", "waiting", "bytes", "oldest", "topics of the first", "moved aside")
    for one in views:
        waiting = one.waiting
        about = "" if waiting.exact else "about "
        table.add_row(
            one.writer,
            one.mode.value,
            f"{about}{waiting.rows:,}",
            f"{about}{waiting.size:,}",
            _seconds(waiting.oldest_s),
            ", ".join(f"{topic}: {count:,}" for topic, count in one.topics.items()) or "-",
            f"{one.aside_count:,}",
            style="bold" if one.aside_count else None,
        )
    return table


def aside_table(messages: Sequence[AsideMessage]) -> Table:
    """The second table: messages that were moved aside. Shows no values."""
    table = plain_table("writer", "number", "topic", "partition", "key", "bytes", "moved at", "reason")
    for one in messages:
        table.add_row(
            one.writer,
            str(one.number),
            one.topic,
            "-" if one.partition is None else str(one.partition),
            "-" if one.key is None else repr(one.key)[2:-1],
            f"{len(one.value or b''):,}",
            f"{one.moved_at:%Y-%m-%d %H:%M:%S}",
            one.reason,
        )
    return table


def outbox_json(view: OutboxView) -> dict[str, object]:
    """One writer as ``dualwrite outbox list --json`` shows it."""
    return {
        "writer": view.writer,
        "mode": view.mode.value,
        "rows": view.waiting.rows,
        "bytes": view.waiting.size,
        "oldest_s": view.waiting.oldest_s,
        "exact": view.waiting.exact,
        "topics": dict(view.topics),
        "aside_count": view.aside_count,
        "aside": [aside_json(one) for one in view.aside],
    }


def aside_json(message: AsideMessage, *, whole: bool = False) -> dict[str, object]:
    """One message that was moved aside; its value only if it is shown whole."""
    shown: dict[str, object] = {
        "number": message.number,
        "writer": message.writer,
        "transactional_id": message.transactional_id,
        "topic": message.topic,
        "partition": message.partition,
        "key": _content(message.key),
        "bytes": len(message.value or b""),
        "timestamp_ms": message.timestamp_ms,
        "put_at": message.put_at.isoformat(),
        "moved_at": message.moved_at.isoformat(),
        "reason": message.reason,
    }
    if whole:
        shown["headers"] = [[name, _content(content)] for name, content in message.headers]
        shown["value"] = _content(message.value)
    return shown


def _content(content: bytes | None) -> str | dict[str, str] | None:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}
