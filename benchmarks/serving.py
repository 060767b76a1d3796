"""``dualwrite serve`` before 10,000 ids, a thousand of them left by dead owners, beside a hundred open transactions of other programs.

A first replica may settle nothing yet, and looks and shows its page. A second one settles everything. Besides, one writer
is killed after its decision, and it is measured how long the service takes from the death to the end in Kafka.

``PYTHONPATH=tests/proof python -m benchmarks --only serve``
"""

from __future__ import annotations

import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from confluent_kafka import Producer
from harness.forking import processes
from harness.patience import wait_until
from sqlalchemy import create_engine, text

from benchmarks.servers import Ground, p50
from benchmarks.settling import leave_decided
from dualwrite import DualWriter, WriterLimits, failpoints
from dualwrite.recovery.recover import status

INTERVAL_S = 1.0
SETTLE_AFTER_S = 5.0
# Of a replica that shall only look. The broker gives a transaction 900 s: with less than this limit left, any replica settles it.
WATCHING_S = 400.0
IDLE = (
    "INSERT INTO kafka_transaction_state SELECT (jsonb_populate_record(s, jsonb_build_object('transactional_id', "
    "'idle-' || lpad(i::text, 5, '0')))).* FROM kafka_transaction_state s, generate_series(1, :ids) i "
    "WHERE s.transactional_id = 'idle'"
)
"""Copies of the row of a writer that was closed: nothing of it is unsettled, so nobody asks Kafka about it."""


class Service:
    """A replica, and what it shows."""

    def __init__(
        self,
        ground: Ground,
        directory: Path,
        *,
        settle_after_s: float,
        prefix: str = "",
        interval_s: float = INTERVAL_S,
    ) -> None:
        file = directory / f"serve-{secrets.token_hex(4)}.toml"
        narrowed = f'prefix = "{prefix}"\n' if prefix else ""
        file.write_text(
            f'listen = "127.0.0.1:0"\ninterval_s = {interval_s}\nlease_timeout_s = 3\nsettle_after_s = {settle_after_s}\n'
            f'[target.{prefix.rstrip("-") or "bench"}]\nurl = "{ground.url}"\n{narrowed}'
            f'kafka.bootstrap.servers = "{ground.kafka["bootstrap.servers"]}"\n'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from dualwrite.cli import main; main()", "serve", "--config", str(file)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> None:
        """Wait until it listens."""
        wait_until(lambda: self._address() is not None or self.process.poll() is not None)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as said:
            self.log.extend((time.perf_counter(), line) for line in said)

    def _address(self) -> str | None:
        return next(
            (found[1] for _, line in self.log if (found := re.search(r"listening on (http://\S+)", line))), None
        )

    def get(self, path: str) -> str:
        """The body of a page."""
        with urllib.request.urlopen(f"{self._address()}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The only sample of a metric; -1 before it is there."""
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return -1.0 if found is None else float(found[1])

    def said_at(self, words: str) -> float:
        """When its log said so first."""
        return next(at for at, line in self.log if words in line)

    def peak_mib(self) -> float:
        """Its most resident memory so far."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) / 1024

    def close(self) -> None:
        """Stop it, and wait for its end."""
        self.process.terminate()
        self.process.wait(120)
        self._reader.join()


@contextmanager
def service(ground: Ground, **settings: Any) -> Iterator[Service]:
    with TemporaryDirectory() as directory:
        replica = Service(ground, Path(directory), **settings)
        try:
            replica.wait()
            yield replica
        finally:
            replica.close()


def _fill(ground: Ground, ids: int) -> None:
    """Rows of so many writers that were closed."""
    engine = create_engine(ground.url)
    limits = WriterLimits(max_lanes=1)
    with DualWriter("idle", kafka=ground.kafka, database=engine, limits=limits) as writer, writer.transaction() as tx:
        tx.produce(ground.topic(), value="once")
    with engine.begin() as connection:
        connection.execute(text(IDLE), {"ids": ids})
    engine.dispose()


def _open_others(ground: Ground, count: int) -> list[Producer]:
    """Open transactions of producers that this library knows nothing of."""
    topic, producers = ground.topic(), []
    for number in range(count):
        producer = Producer({**ground.kafka, "transactional.id": f"other-{number}", "transaction.timeout.ms": 900_000})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(topic, b"open")
        producer.flush()
        producers.append(producer)
    return producers


def _rounds(ground: Ground, ids: int, to_settle: int, others: int, looks: int) -> dict[str, float]:
    _fill(ground, ids - to_settle)
    leave_decided(ground, to_settle, ground.topic())
    producers = _open_others(ground, others)
    took, pages = [], []
    with service(ground, settle_after_s=WATCHING_S) as watching:
        for number in range(looks):
            wait_until(lambda number=number: watching.metric("dualwrite_serve_rounds_total") > number, 120.0)
            took.append(watching.metric("dualwrite_round_duration_seconds"))
            begun = time.perf_counter()
            watching.get("/")
            pages.append((time.perf_counter() - begun) * 1000)
        seen = json.loads(watching.get("/api/status"))["targets"]["bench"]
        planned = sum(one["writer"].startswith("left-") for one in seen["plan"])
        beside = sum(one["kafka_id"].startswith("other-") for one in seen["open_transactions"])
        if (planned, beside) != (to_settle, others):
            said = "".join(line for _, line in watching.log[-10:])
            raise RuntimeError(
                f"it sees {planned} to settle and {beside} of others, not {to_settle} and {others}\n{said}"
            )
        looking_mib = watching.peak_mib()
    with service(ground, settle_after_s=SETTLE_AFTER_S) as settling:
        wait_until(lambda: settling.metric("dualwrite_serve_settled_ids_total") >= to_settle, 600.0, pause_s=0.2)
        settled_at = time.perf_counter()
        began = settling.said_at("left-00000: settle: ")
        settling_mib = settling.peak_mib()
    assert not any(one.needs_recovery for one in status(kafka=ground.kafka, database=ground.url, prefix="left-"))
    while producers:
        producers.pop().abort_transaction()
    return {
        "look s": p50(took),
        "settle s": settled_at - began,
        "page ms": p50(pages),
        "page ms, slowest": max(pages),
        "MiB, looking": looking_mib,
        "MiB, settling": settling_mib,
    }


def _victim(kafka: Mapping[str, str], url: str, name: str, topic: str) -> None:
    """Dies by SIGKILL with its transaction decided."""
    failpoints.arm("write.decided:1:kill")
    limits = WriterLimits(max_lanes=1)
    with DualWriter(name, kafka=kafka, database=url, limits=limits) as writer, writer.transaction() as tx:
        tx.produce(topic, "of the victim")


def _death_to_settled(ground: Ground, rounds: int) -> list[float]:
    """Seconds from the death of a writer until its transaction has ended in Kafka."""
    found, topic = [], ground.topic(1)
    with service(ground, settle_after_s=SETTLE_AFTER_S, prefix="victim-") as serving:
        time.sleep(SETTLE_AFTER_S + INTERVAL_S)  # until then it leaves everything alone, as after an outage
        for number in range(rounds):
            name = f"victim-{number}"
            victim = processes().Process(target=_victim, args=(ground.kafka, ground.url, name, topic))
            victim.start()
            victim.join()
            died = time.perf_counter()
            wait_until(lambda name=name: any(f"{name}: 1 id settled" in line for _, line in serving.log), 120.0)
            found.append(serving.said_at(f"{name}: 1 id settled") - died)
    return found


def run(
    ground: Ground, *, ids: int = 10_000, to_settle: int = 1000, others: int = 100, looks: int = 5, rounds: int = 5
) -> dict[str, Any]:
    """Measure."""
    found: dict[str, Any] = {"ids": ids, "to settle": to_settle, "others": others, "settle after s": SETTLE_AFTER_S}
    found |= _rounds(ground, ids, to_settle, others, looks)
    deaths = _death_to_settled(ground, rounds)
    found |= {"death to settled s": statistics.median(deaths), "death to settled s, longest": max(deaths)}
    found["load"] = os.getloadavg()[0]
    return found


def section(figures: Mapping[str, Any]) -> list[str]:
    """The section of the page."""
    return [
        "## A service that settles",
        "",
        f"[`dualwrite serve`](serve.md) before {figures['ids']:,} ids, {figures['to settle']:,} of them left by dead owners, beside "
        f"{figures['others']} open transactions of other programs. The machine's load was {figures['load']:.0f} at the end.",
        "",
        f"- A look at all of them: **{figures['look s']:.1f} s**; settling the {figures['to settle']:,}: "
        f"**{figures['settle s']:.1f} s** (aim of a round: 10 s).",
        f"- The page while all of them are open: **{figures['page ms']:.0f} ms**, the slowest "
        f"{figures['page ms, slowest']:.0f} ms (aim: 300 ms).",
        f"- Memory: **{figures['MiB, looking']:.0f} MiB** while it looks, {figures['MiB, settling']:.0f} MiB with the settling "
        "(aim: 200 MiB).",
        f"- From the death of a writer to the end of its decided transaction: **{figures['death to settled s']:.1f} s**, at the "
        f"longest {figures['death to settled s, longest']:.1f} s, with `settle_after_s = {figures['settle after s']:g}` "
        f"(aim: {figures['settle after s'] + 5:g} s).",
        "",
    ]
