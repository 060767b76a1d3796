"""A service dies between its two commits; the next start brings Kafka in line with the database.

Run it without arguments: it starts a Kafka broker and a PostgreSQL server of its own, or uses those that
``DUALWRITE_TEST_KAFKA`` and ``DUALWRITE_TEST_POSTGRES`` name.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select

from dualwrite import DualWriter, migrations, recover
from dualwrite.recovery.recover import status
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, read_committed

METADATA = MetaData()
PAYMENTS = Table("payments", METADATA, Column("id", Integer, primary_key=True))


def serve(bootstrap_servers: str, url: str, topic: str) -> None:
    """Run the service: one dual write."""
    with (
        DualWriter("payments", kafka={"bootstrap.servers": bootstrap_servers}, database=url) as writer,
        writer.transaction() as tx,
    ):
        tx.produce(topic, value="1")
        tx.connection.execute(insert(PAYMENTS).values(id=1))


def on_startup(kafka: dict[str, str], url: str) -> list[str]:
    """The start-up hook: settle what dead processes left behind, for all ids with the prefix.

    Opening a ``DualWriter`` does this for its own id. The hook is for ids whose writer does not come back: a worker that was
    scaled down, a job that has run for the last time. If other members of the service are running, keep the default
    ``open_for_s`` of 60 seconds: recovery fences a writer whose open transaction it settles.
    """
    return recover(prefix="payments", open_for_s=0, kafka=kafka, database=url).rolled_forward


def main() -> None:
    """Kill the service right after the database commit, then recover."""
    with EmbeddedKafka() as servers, EmbeddedPostgres() as postgres:
        kafka, url = servers.client_config(), postgres.create_database()
        topic = servers.create_topic(f"payments-{secrets.token_hex(4)}")
        engine = create_engine(url)
        with engine.connect() as connection:
            migrations.upgrade(connection)
        METADATA.create_all(engine)

        # The fail point makes the service send SIGKILL to itself: no cleanup, no goodbye to Kafka.
        service = subprocess.run(
            [sys.executable, __file__, kafka["bootstrap.servers"], url, topic],
            env={**os.environ, "DUALWRITE_FAILPOINT": "write.decided"},
            check=False,
        )
        assert service.returncode == -signal.SIGKILL
        with engine.connect() as connection:
            rows = list(connection.scalars(select(PAYMENTS.c.id)))
        [left] = [item for item in status("payments", kafka=kafka, database=engine) if item.needs_recovery]
        print(f"killed after the database commit: rows {rows}, Kafka transaction {left.kafka_status.value}")

        print(f"recovered: {on_startup(kafka, url)} rolled forward")

        messages = [int(record.value or b"") for record in read_committed(kafka, topic)]
        print(f"rows {rows}, messages {messages}")
        assert rows == messages == [1]
        assert not any(item.needs_recovery for item in status("payments", kafka=kafka, database=engine))
        engine.dispose()


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(*sys.argv[1:])
    else:
        main()
