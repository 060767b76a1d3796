"""How fast ``dualwrite relay`` sends a backlog of an outbox table, in the layout of Debezium's outbox event router.

``PYTHONPATH=tests/proof python -m benchmarks.relay [messages] [bytes of each ...]``

``PYTHONPATH=tests/proof python -m benchmarks.relay --old-snapshot [messages] [rows of a transaction]``: with a snapshot that stays
open meanwhile, as a backup's does. Sent rows stay dead at the head of the index: reads begin behind them where the database
always generates the numbers, and step over them elsewhere.
"""

from __future__ import annotations

import resource
import secrets
import sys
import time
from contextlib import closing

from sqlalchemy import create_engine, text

from benchmarks.servers import Ground, servers
from dualwrite.clock import now_s
from dualwrite.operations import OutboxTable, Relay, RelayReport
from dualwrite.testing.checker import stable_ends

PARTITIONS = 4
TABLE = (
    "CREATE TABLE outbox_events (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,"
    " type varchar(255) NOT NULL, payload text, seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE)"
)
FILL = (
    "INSERT INTO outbox_events (id, aggregatetype, aggregateid, type, payload) SELECT gen_random_uuid(), :topic,"
    " (i % 1000)::text, 'made', repeat('a', :size) FROM generate_series(1, :rows) i"
)


def run(
    ground: Ground, *, messages: int = 1_000_000, sizes: tuple[int, ...] = (100, 1000), most_rows: int = 20_000
) -> dict[str, dict[str, float]]:
    """Send a backlog of each size; messages a second from the first transaction on, by whether they have the header of the id."""
    return {
        f"{size} bytes, {named}": _send(ground, messages, size, most_rows, header)
        for size in sizes
        for named, header in (("with the id's header", "id"), ("no header", None))
    }


def run_beside_a_snapshot(
    ground: Ground, *, messages: int = 300_000, size: int = 100, most_rows: int = 1_000
) -> dict[str, dict[str, float]]:
    """Send a backlog while a snapshot that is older than all deletes stays open."""
    return {
        f"numbers generated {generated.lower()}": _send(
            ground, messages, size, most_rows, None, table=TABLE.replace("ALWAYS", generated), old_snapshot=True
        )
        for generated in ("ALWAYS", "BY DEFAULT")
    }


def _send(
    ground: Ground,
    messages: int,
    size: int,
    most_rows: int,
    header: str | None,
    *,
    table: str = TABLE,
    old_snapshot: bool = False,
) -> dict[str, float]:
    engine = create_engine(ground.url)
    topic = ground.topic(PARTITIONS)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS outbox_events"))
        connection.execute(text(table))
        connection.execute(text(FILL), {"topic": topic, "size": size, "rows": messages})
    snapshot = engine.connect().execution_options(isolation_level="REPEATABLE READ")
    if old_snapshot:
        snapshot.execute(text("SELECT count(*) FROM outbox_events"))
    seen: list[tuple[float, int]] = []

    def note(report: RelayReport) -> None:
        if report.messages and (not seen or report.messages > seen[-1][1]):
            seen.append((now_s(), report.messages))

    relay = Relay(
        OutboxTable(topic="${routedByValue}", order_by=["seq"], id_column=header),
        kafka={**ground.kafka, "compression.type": "lz4"},
        database=engine,
        name=f"relay-{secrets.token_hex(4)}",
        most_rows=most_rows,
        progress=note,
    )
    with closing(snapshot):
        spent = time.process_time()
        relay.run(once=True)
        spent = time.process_time() - spent
    engine.dispose()
    (began, first), (ended, last) = seen[0], seen[-1]
    assert last == messages
    assert sum(stable_ends(ground.kafka, topic).values()) >= messages
    return {
        "a second": (last - first) / (ended - began),
        "processor us": spent / messages * 1e6,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    beside_a_snapshot = "--old-snapshot" in sys.argv
    given = [int(one) for one in sys.argv[1:] if one != "--old-snapshot"]
    with servers({"transaction.max.timeout.ms": "2147483647"}) as started:
        if beside_a_snapshot:
            found = run_beside_a_snapshot(
                started, messages=(given or [300_000])[0], most_rows=given[1] if given[1:] else 1_000
            )
        else:
            found = run(started, messages=(given or [1_000_000])[0], sizes=tuple(given[1:]) or (100, 1000))
        for case, figures in found.items():
            print(case, ", ".join(f"{name}: {figure:,.1f}" for name, figure in figures.items()), flush=True)
