"""Messages that wait in the database: what a call costs that always lets them wait, and how fast a backlog of them is sent.

The backlog is sent by a writer from its own table, and by ``dualwrite relay`` from a table of the user's; beside them, other
relays. ``PYTHONPATH=tests/proof python -m benchmarks.outbox [messages] [bytes of each ...]`` measures the writer's alone.
"""

from __future__ import annotations

import resource
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from unittest import mock

from sqlalchemy import create_engine, text

from benchmarks import always, relay
from benchmarks.rivals import measure as rivals
from benchmarks.servers import Ground, servers
from dualwrite.clock import Deadline, now_s
from dualwrite.protocol import outbox as rules
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing.checker import stable_ends
from dualwrite.writing import sender
from dualwrite.writing.left_behind import send_for

PARTITIONS = 4
SMALL: Final = 100
FILL = (
    "INSERT INTO dualwrite_outbox (writer, transactional_id, topic, key, value) SELECT :writer, :writer, :topic,"
    " convert_to((i % 1000)::text, 'UTF8'), convert_to(repeat('a', :size), 'UTF8') FROM generate_series(1, :rows) i"
)
LATER = "INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES (:writer, 'later')"


def run(
    ground: Ground,
    *,
    messages: int = 1_000_000,
    sizes: Sequence[int] = (SMALL, 1000),
    few: int = 500,
    messages_by_few: int = 100_000,
    of_rivals: int = 100_000,
    small: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure the calls, with ``small`` arguments if given, and backlogs. Of rivals, which are installed first, so many messages."""
    return {
        "calls": always.run(ground, **(small or {})),
        "backlog": backlog(ground, messages=messages, sizes=sizes, few=few, messages_by_few=messages_by_few),
        "relay": relay.run(ground, messages=messages, sizes=tuple(sizes)),
        "rivals": rivals.run(of_rivals, SMALL) if of_rivals else {},
    }


def backlog(
    ground: Ground, *, messages: int, sizes: Sequence[int], few: int = 500, messages_by_few: int = 100_000
) -> dict[str, dict[str, float]]:
    """Send a backlog of each size, as large sends as the sender makes; and one of 100 bytes with few messages in each send."""
    found = {f"{size} bytes": _send(ground, messages, size, rules.MOST_ROWS) for size in sizes}
    found[f"{SMALL} bytes, {few} a send"] = _send(ground, messages_by_few, SMALL, few)
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


def section(figures: Mapping[str, Any], *, table: Callable[[Sequence[str], Any], list[str]]) -> list[str]:
    """The section of the page."""
    calls, backlogs, relays, others = (figures[name] for name in ("calls", "backlog", "relay", "rivals"))
    mine, unsafe, polled = (calls[name] for name in (always.ALWAYS, always.UNSAFE, always.OUTBOX))

    def aim(words: str, other: Mapping[str, float], figure: str, most: str) -> str:
        return f"- {words}: **{mine[figure] / other[figure]:.2f}** (aim: {most})."

    lines = [
        "## Messages that wait",
        "",
        'With `outbox="always"` a block writes its messages as rows, and the writer sends them from a thread of the same process. '
        "One caller, back to back, in slices in turn; the processor time has the sender's in it. The outbox's relay polls every "
        "10 ms, in a process of its own, which is not counted.",
        "",
        *table(
            ("way", "call p50, ms", "p95", "processor, ms", "visible p50, ms", "p95"),
            ([name, *(f"{way[figure]:.2f}" for figure in always.OF_ONE_CALLER)] for name, way in calls.items()),
        ),
        aim("The call, to the unsafe way", unsafe, "call p50", "at most 1.15"),
        aim("Processor time, to the unsafe way", unsafe, "processor", "at most 2"),
        aim("Visible, to an outbox with a 10 ms poll", polled, "visible p50", "at most 0.5"),
        aim(f"{always.THREADS} threads, calls a second, to the unsafe way", unsafe, "threads a second", "at least 0.6"),
        aim(f"{always.TASKS} tasks, calls a second, to the unsafe way", unsafe, "tasks a second", "at least 0.8"),
        "",
        "A backlog is sent in dual writes of up to 20,000 messages, each once and in order, with lz4:",
        "",
        *table(
            ("backlog", "messages a second", "processor, us a message", "peak memory, MiB"),
            (
                [f"{who}, {case}", f"{one['a second']:,.0f}", f"{one['processor us']:.1f}", f"{one['peak MiB']:.0f}"]
                for who, cases in (("a writer", backlogs), ("`dualwrite relay`", relays))
                for case, one in cases.items()
            ),
        ),
        "Aims: 150,000 a second of 100 bytes, 70,000 of 1,000 bytes, and 30,000 with 500 messages in a send.",
        "",
    ]
    if others:
        lines += [
            "Other relays, each on a full table of its own, with messages of 100 bytes. They deliver at least once: after a crash "
            "some messages are there twice. (`python -m benchmarks.rivals.measure`)",
            "",
            *table(("relay", "messages a second"), ([name, f"{rate:,.0f}"] for name, rate in others.items())),
        ]
    return lines


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    with servers({"transaction.max.timeout.ms": "2147483647"}) as started:
        for case, measured in backlog(
            started, messages=(asked or [1_000_000])[0], sizes=asked[1:] or (SMALL, 1000)
        ).items():
            print(case, ", ".join(f"{name}: {figure:,.1f}" for name, figure in measured.items()), flush=True)
