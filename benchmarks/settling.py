"""Settling many ids that were left prepared and decided."""

from __future__ import annotations

import time

from harness.death import mortal
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert

from benchmarks.servers import Ground
from dualwrite import DualWriter, WriterLimits, failpoints, recover
from dualwrite.failpoints import FailpointError

METADATA = MetaData()
ROWS = Table("settling_rows", METADATA, Column("id", Integer, primary_key=True), Column("note", Text))


def leave_decided(ground: Ground, ids: int, topic: str) -> None:
    """For each id: a transaction decided by the database, open in Kafka, its owner gone."""
    engine = create_engine(ground.url)
    METADATA.drop_all(engine)  # another part of the same run has left its rows
    METADATA.create_all(engine)
    for number in range(ids):
        writer = mortal(
            DualWriter(f"left-{number:05d}", kafka=ground.kafka, database=engine, limits=WriterLimits(max_lanes=1))
        )
        with writer:
            failpoints.arm("write.decided:1:raise")
            try:
                with writer.transaction() as tx:
                    tx.produce(topic, value=str(number))
                    tx.connection.execute(insert(ROWS).values(id=number, note="left"))
            except FailpointError:
                pass
            finally:
                failpoints.arm("")
    engine.dispose()


def run(ground: Ground, *, ids: int = 1000) -> dict[str, float]:
    """Measure; seconds for all, milliseconds for one."""
    topic = ground.topic()
    leave_decided(ground, ids, topic)
    started = time.perf_counter()
    report = recover(open_for_s=0, kafka=ground.kafka, database=ground.url, prefix="left-")
    seconds = time.perf_counter() - started
    if len(report.settled) != ids or len(report.rolled_forward) != ids:
        raise RuntimeError(f"{len(report.settled)} settled, {len(report.rolled_forward)} rolled forward, of {ids}")
    return {"ids": ids, "seconds": seconds, "ms per id": seconds * 1000 / ids}
