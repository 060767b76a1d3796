"""A process that dual-writes operations with unique ids over two partitions, and journals what it was told.

Run as ``python -m harness.worker JOB.json``; killed by fail points from outside. Each line of the journal is flushed to disk
before the next operation begins, so it survives SIGKILL.
"""

import json
import os
import sys
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, event

from dualwrite import CompletionPending, DualWriter, TransactionAborted

METADATA = MetaData()
OPERATIONS = Table("operations", METADATA, Column("id", Text, primary_key=True), Column("position", Integer))


def journal(path: str, word: str, operation: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{word} {operation}\n")
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engine = create_engine(job["url"])
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def _durable(connection, _record):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    METADATA.create_all(engine)
    with DualWriter(
        job["transactional_id"],
        kafka=job["kafka"],
        engine=engine,
        max_lanes=job.get("max_lanes", 1),
        paused_owner_timeout_s=job.get("paused_owner_timeout_s", 60),
    ) as writer:
        print("open", flush=True)  # noqa: T201 - the parent waits for it
        for position in range(job["operations"]):
            operation = f"{job['name']}-{position}"
            journal(job["journal"], "begin", operation)
            try:
                with writer.transaction() as tx:
                    for partition in (0, 1):
                        tx.produce(job["topic"], value=operation, key=str(partition), partition=partition)
                    tx.connection.execute(OPERATIONS.insert().values(id=operation, position=position))
                    if position in job.get("abort", []):
                        raise KeyError(operation)
            except KeyError:
                journal(job["journal"], "aborted", operation)
            except TransactionAborted:
                journal(job["journal"], "aborted", operation)
            except CompletionPending:
                journal(job["journal"], "acknowledged", operation)
            else:
                journal(job["journal"], "acknowledged", operation)


if __name__ == "__main__":
    main()
