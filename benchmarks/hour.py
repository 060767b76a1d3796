"""An hour of ``outbox="always"`` at full rate: whether sends stay as fast as the table ages, minute by minute.

Rows that were deleted stand at the head of the index until autovacuum has removed them, and a snapshot that is held open keeps all
of them. ``PYTHONPATH=tests/proof python -m benchmarks.hour [--minutes 60] [--snapshot]``
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, text

from benchmarks.always import always
from benchmarks.servers import machine, p50, p95, servers
from benchmarks.ways import METADATA, Write
from dualwrite.stores.sql.outbox import SqlOutbox

THREADS = 8
_DEAD = text("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'dualwrite_outbox'")
_WAITING = text("SELECT count(*) FROM dualwrite_outbox")


class Reads:
    """The milliseconds of each of the sender's reads, and the messages that they found, since they were last taken."""

    def __init__(self) -> None:
        self._real = SqlOutbox.read
        self._took: list[float] = []
        self._messages = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure them while the block runs."""

        def read(outbox: SqlOutbox, connection: Connection, *given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = self._real(outbox, connection, *given, **options)
            self._took.append(1000 * (time.perf_counter() - began))
            self._messages += len(found.numbers)
            return found

        SqlOutbox.read = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            SqlOutbox.read = self._real  # type: ignore[method-assign]

    def take(self) -> tuple[list[float], int]:
        """What was measured since the last call."""
        found, self._took, self._messages = (self._took, self._messages), [], 0
        return found


@contextmanager
def snapshot(engine: Engine) -> Iterator[None]:
    """Hold one open, as a backup does."""
    with engine.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        connection.execute(_WAITING)
        yield


def run(write: Write, engine: Engine, minutes: int, reads: Reads) -> Iterator[dict[str, float]]:
    """Write at full rate; the figures of each minute once it is over."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            write(["x"])

    with ThreadPoolExecutor(THREADS) as threads, engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        running = [threads.submit(work) for _ in range(THREADS)]
        try:
            began = time.perf_counter()
            for _ in range(minutes):
                time.sleep(60)
                took, messages = reads.take()
                seconds, began = time.perf_counter() - began, time.perf_counter()
                yield {
                    "messages a second": messages / seconds,
                    "read p50 (ms)": p50(took),
                    "read p95 (ms)": p95(took),
                    "dead rows": connection.scalar(_DEAD) or 0,
                    "waiting": connection.scalar(_WAITING) or 0,
                }
        finally:
            stop.set()
        for one in running:
            one.result()


def main() -> None:
    """Print a line for each minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--snapshot", action="store_true", help="hold a snapshot open all the time")
    options = parser.parse_args()
    print(machine(), flush=True)
    reads = Reads()
    with servers({"transaction.max.timeout.ms": "2147483647"}) as ground, reads.timed():
        engine = create_engine(ground.url, pool_size=2 * THREADS, max_overflow=4)
        METADATA.create_all(engine)
        held = snapshot(engine) if options.snapshot else nullcontext()
        with held, always(ground.kafka, engine, ground.topic()) as write:
            for minute, figures in enumerate(run(write, engine, options.minutes, reads), 1):
                shown = ", ".join(f"{name}: {figure:,.1f}" for name, figure in figures.items())
                print(f"minute {minute}: {shown}", flush=True)
        engine.dispose()


if __name__ == "__main__":
    main()
