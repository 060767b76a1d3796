"""How fast a writer sends a backlog of messages that wait in its database, each once and in order.

``PYTHONPATH=tests/proof python -m benchmarks.outbox [messages] [bytes of each ...]``
"""

from __future__ import annotations

import resource
import secrets
import sys
import time
from unittest import mock

from sqlalchemy import create_engine, text

from benchmarks.servers import Ground, servers
from dualwrite.clock import Deadline, now_s
from dualwrite.protocol import outbox as rules
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing.reading import stable_ends
from dualwrite.writing import sender
from dualwrite.writing.left_behind import send_for

PARTITIONS = 4
FILL = (
    "INSERT INTO dualwrite_outbox (writer, transactional_id, topic, key, value) SELECT :writer, :writer, :topic,"
    " convert_to((i % 1000)::text, 'UTF8'), convert_to(repeat('a', :size), 'UTF8') FROM generate_series(1, :rows) i"
)
LATER = "INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES (:writer, 'later')"


def run(
    ground: Ground,
    *,
    messages: int = 1_000_000,
    sizes: tuple[int, ...] = (100, 1000),
    few: int = 500,
    messages_by_few: int = 100_000,
) -> dict[str, dict[str, float]]:
    """Send a backlog of each size, as large sends as the sender makes; and one of 100 bytes with few messages in each send."""
    found = {f"{size} bytes": _send(ground, messages, size, rules.MOST_ROWS) for size in sizes}
    found[f"100 bytes, {few} a send"] = _send(ground, messages_by_few, 100, few)
    return found


def _send(ground: Ground, messages: int, size: int, most_rows: int) -> dict[str, float]:
    engine = create_engine(ground.url)
    topic, writer = ground.topic(PARTITIONS), f"drain-{secrets.token_hex(4)}"
    with engine.begin() as connection:
        given = {"writer": writer, "topic": topic, "size": size, "rows": messages}
        connection.execute(text(FILL), given)
        connection.execute(text(LATER), {"writer": writer})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE dualwrite_outbox"))
    spent, began = time.process_time(), now_s()
    with mock.patch.object(sender, "MOST_ROWS", most_rows):
        sent = send_for(
            writer,
            kafka={**ground.kafka, "compression.type": "lz4"},
            database=SqlDatabase(engine),
            deadline=Deadline(3600.0),
        )
    took, spent = now_s() - began, time.process_time() - spent
    engine.dispose()
    assert sent == messages
    assert sum(stable_ends(ground.kafka, topic).values()) >= messages
    return {
        "a second": messages / took,
        "processor us": spent / messages * 1e6,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    with servers({"transaction.max.timeout.ms": "2147483647"}) as started:
        for case, figures in run(
            started, messages=(asked or [1_000_000])[0], sizes=tuple(asked[1:]) or (100, 1000)
        ).items():
            print(case, ", ".join(f"{name}: {figure:,.1f}" for name, figure in figures.items()), flush=True)
