"""Messages that wait in the database: what a call costs that always lets them wait, and how fast a backlog of them is sent.

The backlog is sent by a writer from its own table, by ``dualwrite relay`` from a table of the user's, and by other relays, in
turn, round after round, on the same servers, with messages that compression makes no shorter. Each is sent in a process of its
own, whose memory is measured.
``PYTHONPATH=tests/proof python -m benchmarks.outbox [--messages N] [--of-rivals N] [--rounds N]`` measures the backlogs alone
(with the defaults half an hour).
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from unittest import mock

from sqlalchemy import create_engine, text

from benchmarks import always, relay
from benchmarks.calls import in_new_process
from benchmarks.rivals import measure as rivals
from benchmarks.servers import Ground, noise, peak_mib, servers
from dualwrite.clock import Deadline, now_s
from dualwrite.protocol import outbox as rules
from dualwrite.stores.sql.database import SqlDatabase
from dualwrite.testing.checker import stable_ends
from dualwrite.writing import sender
from dualwrite.writing.left_behind import send_for

PARTITIONS = 4
SMALL: Final = 100
FILL = (
    "WITH {noise} INSERT INTO dualwrite_outbox (writer, transactional_id, topic, key, value) SELECT :writer, :writer, :topic,"
    " convert_to((i % 1000)::text, 'UTF8'), convert_to(value, 'UTF8')"
    " FROM generate_series(1, :rows) i JOIN noise ON n = i % 20000"
)
LATER = "INSERT INTO dualwrite_outbox_mode (writer, mode) VALUES (:writer, 'later')"
WRITER, RELAY = "a writer", "`dualwrite relay`"
DEBEZIUM: Final = "Debezium engine"
_OF_OURS: Final = (("messages", ",.0f"), ("a second", ",.0f"), ("processor us", ".1f"), ("peak MiB", ".0f"))
PROPERTIES: Final = {"transaction.max.timeout.ms": "2147483647"}


def run(
    ground: Ground, *, rounds: int = 3, of_rivals: int = 100_000, small: Mapping[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    """Measure the calls, with ``small`` arguments if given, and the backlogs of :func:`backlogs`, on servers of their own."""
    calls = always.run(ground, **(small or {}))
    with servers(PROPERTIES, database=rivals.LOGICAL) as own:
        sent = backlogs(own, rounds=rounds, of_rivals=of_rivals, **given)
    return {"calls": calls, "rounds": rounds, "of rivals": of_rivals, "backlogs": sent}


def backlogs(
    ground: Ground,
    *,
    messages: int = 1_000_000,
    sizes: Sequence[int] = (SMALL, 1000),
    few: int = 500,
    messages_by_few: int = 100_000,
    of_rivals: int = 100_000,
    rounds: int = 3,
) -> dict[str, dict[str, float]]:
    """Send a backlog in each way in turn, and that round after round.

    Returns:
        By way the medians over the rounds. Rivals, if so many messages of theirs are not none, have a rate alone.
    """
    most = rules.MOST_ROWS
    writer, by_relay = partial(_measured, ground, by_writer), partial(_measured, ground, relay.send)
    ways: dict[str, Callable[[], dict[str, float]]] = {}
    for size in sizes:
        ways[f"{WRITER}, {size} bytes"] = partial(writer, messages, size, most)
        ways[f"{RELAY}, {size} bytes, with the id's header"] = partial(by_relay, messages, size, header="id")
        ways[f"{RELAY}, {size} bytes, no header"] = partial(by_relay, messages, size)
        ways[f"{WRITER}, {size} bytes, a tenth of them"] = partial(writer, messages // 10, size, most)
        ways[f"{RELAY}, {size} bytes, a tenth of them"] = partial(by_relay, messages // 10, size)
    ways[f"{WRITER}, {SMALL} bytes, {few} a send"] = partial(writer, messages_by_few, SMALL, few)
    for rival in rivals.RIVALS if of_rivals else ():
        ways[rival.name] = partial(_rival, ground, rival, of_rivals)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, send in ways.items():
            found[name].append(send())
            print(name, ", ".join(f"{figure}: {value:,.1f}" for figure, value in found[name][-1].items()), flush=True)
    return {
        name: {figure: statistics.median(one[figure] for one in all_rounds) for figure in all_rounds[0]}
        for name, all_rounds in found.items()
    }


def _measured(ground: Ground, send: Callable[..., dict[str, float]], *given: Any, **named: Any) -> dict[str, float]:
    topic = ground.topic(PARTITIONS)
    try:
        return in_new_process(partial(send, ground.kafka, ground.url, topic, *given, **named))
    finally:
        ground.kafka_server.delete_topic(topic)


def _rival(ground: Ground, rival: rivals.Rival, rows: int) -> dict[str, float]:
    return {"a second": rivals.per_second(rival, ground.kafka_server, ground.postgres, rows=rows, size=SMALL)}


def by_writer(
    kafka: Mapping[str, str], url: str, topic: str, messages: int, size: int, most_rows: int
) -> dict[str, float]:
    """Fill the library's own table, and send it as a writer's sender does, at most so many rows at a time."""
    engine = create_engine(url)
    writer = f"drain-{secrets.token_hex(4)}"
    with engine.begin() as connection:
        given = {"writer": writer, "topic": topic, "rows": messages}
        connection.execute(text(FILL.format(noise=noise(size))), given)
        connection.execute(text(LATER), {"writer": writer})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE dualwrite_outbox"))
    spent, began = time.process_time(), now_s()
    with mock.patch.object(sender, "MOST_ROWS", most_rows):
        sent = send_for(
            writer,
            kafka={**kafka, "compression.type": "lz4"},
            database=SqlDatabase(engine),
            deadline=Deadline(3600.0),
        )
    took, spent = now_s() - began, time.process_time() - spent
    engine.dispose()
    assert sent == messages
    assert sum(stable_ends(kafka, topic).values()) >= messages
    return {
        "messages": messages,
        "a second": messages / took,
        "processor us": spent / messages * 1e6,
        "peak MiB": peak_mib(),
    }


def _shortest(mine: Mapping[str, float], direct: Mapping[str, float], polled: Mapping[str, float]) -> str:
    """What the chain takes at least, by the parts of it that are measured."""
    together = mine["call p50"] + direct["visible p50"]
    return (
        f"That is a call, {mine['call p50']:.2f} ms, and then a dual write, whose message is visible after "
        f"{direct['visible p50']:.2f} ms: together **{together / polled['visible p50']:.2f}** of the poll's, without the read and the "
        "thread that wakes. "
    )


def section(figures: Mapping[str, Any], *, table: Callable[[Sequence[str], Any], list[str]]) -> list[str]:
    """The section of the page."""
    calls, sent = figures["calls"], figures["backlogs"]
    mine, unsafe, polled = (calls[name] for name in (always.ALWAYS, always.UNSAFE, always.OUTBOX))
    direct = calls[always.NATIVE]

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
        "A message is visible after a chain of which no link can be left out: the call, the commit that wakes the sender, its read "
        "of the rows, Kafka's acknowledgement of the messages, the decision that deletes the rows, and Kafka's commit. "
        + _shortest(mine, direct, polled)
        + "A relay that may send a message twice does not wait for the decision and for Kafka's commit.",
        "",
        "Calls of many threads or tasks go by processor time. Python runs one thread at a time, and the sender is one of them, while "
        "librdkafka sends beside Python. So a process whose calls need "
        f"{mine['processor']:.2f} ms instead of {unsafe['processor']:.2f} makes at most "
        f"{unsafe['processor'] / mine['processor']:.2f} of the calls; and PostgreSQL, which writes, reads and deletes the messages, "
        "shares the same cores.",
        "",
        "A backlog is sent in dual writes of up to 20,000 messages, each once and in order, with lz4. The text of the messages is "
        "random, so that lz4 saves nothing. All ways take turns on the same servers, each in a process of its own; medians of "
        f"{figures['rounds']} rounds:",
        "",
        *table(
            ("backlog", "messages", "messages a second", "processor, us a message", "peak memory, MiB"),
            (
                [name, *(f"{one[figure]:{form}}" for figure, form in _OF_OURS)]
                for name, one in sent.items()
                if "peak MiB" in one
            ),
        ),
        "Aims: 150,000 a second of 100 bytes, 70,000 of 1,000 bytes, and 30,000 with 500 messages in a send. Memory is bounded if a "
        "tenth of the messages takes about as much. By `python -m benchmarks.outbox`.",
        "",
    ]
    others = {name: one["a second"] for name, one in sent.items() if "peak MiB" not in one}
    if others:
        best = max(rate for name, rate in others.items() if name != DEBEZIUM)
        lines += [
            f"Other relays, each on a full table of its own, with {figures['of rivals']:,} messages of 100 bytes. They deliver at least once: after a crash "
            "some messages are there twice.",
            "",
            *table(("relay", "messages a second"), ([name, f"{rate:,.0f}"] for name, rate in others.items())),
        ]
        for ours in (f"{WRITER}, {SMALL} bytes", f"{RELAY}, {SMALL} bytes, with the id's header"):
            rate = sent[ours]["a second"]
            lines.append(
                f"- {ours}: **{rate / best:.1f}** times the best relay in Python (aim: at least 8), "
                f"**{rate / others[DEBEZIUM]:.1f}** times {DEBEZIUM} (aim: more than 1)."
            )
        lines.append("")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--of-rivals", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with servers(PROPERTIES, database=rivals.LOGICAL) as started:
        backlogs(started, messages=asked.messages, of_rivals=asked.of_rivals, rounds=asked.rounds)
