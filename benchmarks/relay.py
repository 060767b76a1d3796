"""How fast ``dualwrite relay`` sends a backlog of an outbox table, in the layout of Debezium's outbox event router.

``benchmarks.outbox`` measures it beside other relays.

``PYTHONPATH=tests/proof python -m benchmarks.relay --old-snapshot [messages] [rows of a transaction]``: with a snapshot that stays
open meanwhile, as a backup's does. Sent rows stay dead at the head of the index: reads begin behind them where the database
always generates the numbers, and step over them elsewhere.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Mapping
from contextlib import closing

from sqlalchemy import create_engine, text

from benchmarks.servers import Ground, noise, peak_mib, servers
from dualwrite.clock import now_s
from dualwrite.operations import OutboxTable, Relay, RelayReport
from dualwrite.testing.checker import stable_ends

PARTITIONS = 4
TABLE = (
    "CREATE TABLE outbox_events (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL,"
    " type varchar(255) NOT NULL, payload text, seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE)"
)
FILL = (
    "WITH {noise} INSERT INTO outbox_events (id, aggregatetype, aggregateid, type, payload) SELECT gen_random_uuid(), :topic,"
    " (i % 1000)::text, 'made', value FROM generate_series(1, :rows) i JOIN noise ON n = i % 20000"
)


def run_beside_a_snapshot(
    ground: Ground, *, messages: int = 300_000, size: int = 100, most_rows: int = 1_000
) -> dict[str, dict[str, float]]:
    """Send a backlog while a snapshot that is older than all deletes stays open."""
    return {
        f"numbers generated {generated.lower()}": send(
            ground.kafka,
            ground.url,
            ground.topic(PARTITIONS),
            messages,
            size,
            most_rows=most_rows,
            table=TABLE.replace("ALWAYS", generated),
            old_snapshot=True,
        )
        for generated in ("ALWAYS", "BY DEFAULT")
    }


def send(
    kafka: Mapping[str, str],
    url: str,
    topic: str,
    messages: int,
    size: int,
    *,
    header: str | None = None,
    most_rows: int = 20_000,
    table: str = TABLE,
    old_snapshot: bool = False,
) -> dict[str, float]:
    """Fill the table and send it; messages a second from the first transaction on. Each may have the header of the id."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS outbox_events"))
        connection.execute(text(table))
        connection.execute(text(FILL.format(noise=noise(size))), {"topic": topic, "rows": messages})
    snapshot = engine.connect().execution_options(isolation_level="REPEATABLE READ")
    if old_snapshot:
        snapshot.execute(text("SELECT count(*) FROM outbox_events"))
    seen: list[tuple[float, int]] = []

    def note(report: RelayReport) -> None:
        if report.messages and (not seen or report.messages > seen[-1][1]):
            seen.append((now_s(), report.messages))

    relay = Relay(
        OutboxTable(topic="${routedByValue}", order_by=["seq"], id_column=header),
        kafka={**kafka, "compression.type": "lz4"},
        database=engine,
        name=f"relay-{secrets.token_hex(4)}",
        most_rows=most_rows,
        progress=note,
    )
    with closing(snapshot):
        spent, started = time.process_time(), now_s()
        relay.run(once=True)
        spent = time.process_time() - spent
    engine.dispose()
    (began, first), (ended, last) = seen[0] if len(seen) > 1 else (started, 0), seen[-1]
    assert last == messages
    assert sum(stable_ends(kafka, topic).values()) >= messages
    return {
        "messages": messages,
        "a second": (last - first) / (ended - began),
        "processor us": spent / messages * 1e6,
        "peak MiB": peak_mib(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old-snapshot", action="store_true", required=True)
    parser.add_argument("messages", nargs="?", type=int, default=300_000)
    parser.add_argument("most_rows", nargs="?", type=int, default=1_000)
    asked = parser.parse_args()
    with servers({"transaction.max.timeout.ms": "2147483647"}) as ground:
        for case, figures in run_beside_a_snapshot(ground, messages=asked.messages, most_rows=asked.most_rows).items():
            print(case, ", ".join(f"{name}: {figure:,.1f}" for name, figure in figures.items()), flush=True)
