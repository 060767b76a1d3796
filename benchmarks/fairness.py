"""Many threads on few lanes: how long each dual write takes with its wait. Alone: ``PYTHONPATH=tests python -m benchmarks --only fairness``."""

from __future__ import annotations

import threading
import time
from typing import Final

from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert

from benchmarks.servers import Ground, p50
from dualwrite import DualWriter

THREADS: Final = 64
LANES: Final = 8
WARM_UP_S, MEASURED_S = 5.0, 20.0
METADATA = MetaData()
ROWS = Table("fairness_rows", METADATA, Column("id", Integer, primary_key=True), Column("note", Text))


def run(ground: Ground) -> dict[str, float]:
    """Dual writes by 64 threads on 8 lanes; the figures, in milliseconds, of those that began after the warm-up."""
    engine = create_engine(ground.url, pool_size=LANES + 1)
    METADATA.create_all(engine)
    topic = ground.topic()
    took: list[list[float]] = [[] for _ in range(THREADS)]
    with DualWriter("fairness", kafka=ground.kafka, engine=engine, max_lanes=LANES) as writer:
        begin = time.perf_counter() + WARM_UP_S
        end = begin + MEASURED_S

        def work(mine: list[float]) -> None:
            while (started := time.perf_counter()) < end:
                with writer.transaction() as tx:
                    tx.produce(topic, value="x")
                    tx.connection.execute(insert(ROWS).values(note="x"))
                if started >= begin:
                    mine.append(1000 * (time.perf_counter() - started))

        threads = [threading.Thread(target=work, args=(mine,)) for mine in took]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    engine.dispose()
    samples = sorted(sample for mine in took for sample in mine)
    counts = [len(mine) for mine in took]
    return {
        "p50": p50(samples),
        "p99": samples[int(0.99 * len(samples))],
        "longest": samples[-1],
        "per second": len(samples) / MEASURED_S,
        "fewest of a thread": min(counts),
        "most of a thread": max(counts),
    }
