"""The load of a cluster of Spark executors on Kafka and PostgreSQL: measured here, and multiplied. ``make sizing``.

Measured: many transactions opened, decided and completed at once; and the connections of one task. The page is written from
the figures, so that no number is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructType
from sqlalchemy import create_engine, text

from benchmarks.servers import Ground, machine, servers
from benchmarks.transactions import measure
from dualwrite.sinks.spark.options import SinkOptions
from dualwrite.sinks.spark.plan import read_layout
from dualwrite.sinks.spark.sendable import projected_batches
from dualwrite.sinks.spark.targets import Target
from dualwrite.sinks.spark.whole_batch import WholeBatch, prepare_partition

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from line_chart import line_chart, linear

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "sizing.md", DOCS / "sizing-completion.svg"
FIGURES = Path(__file__).with_name("sizing.json")
# The brokers' defaults; those of tests are smaller.
BROKER_DEFAULTS = {"transaction.state.log.num.partitions": "50", "num.network.threads": "3", "num.io.threads": "8"}
PARTITIONS = 4
SETTLE_S = 2.0
DAY_S, WEEK_S = 86_400, 604_800
DEFAULT_MAX_SLOTS = SinkOptions.max_slots


@dataclass(frozen=True)
class Cluster:
    """A cluster of executors, and what runs on it.

    Attributes:
        executors: Number of executors.
        cores: Tasks that each runs at a time.
        brokers: Number of Kafka brokers.
        task_s: How long a task takes, in seconds.
        waves: Partitions of a batch for each task at a time.
    """

    executors: int
    cores: int = 4
    brokers: int = 3
    task_s: float = 30.0
    waves: int = 2

    @property
    def tasks(self) -> int:
        """Tasks at a time."""
        return self.executors * self.cores

    @property
    def partitions(self) -> int:
        """Partitions of a batch."""
        return self.tasks * self.waves

    @property
    def tasks_per_s(self) -> float:
        """Tasks that end each second."""
        return self.tasks / self.task_s


CLUSTERS = (Cluster(10, brokers=3), Cluster(100, brokers=6), Cluster(1000, brokers=12))


def arithmetic(cluster: Cluster, figures: Mapping[str, Any]) -> dict[str, float]:
    """The cluster's needs, from the figures of one transaction and of one task."""
    one = figures["transactions"][-1]
    # The most: where no worker is used again, each task claims its slot, and settles what the one before has left.
    per_transaction = {kind: count / one["count"] for kind, count in one["claim_requests"].items()}
    of_librdkafka, of_kafka_python = cluster.brokers + 2, cluster.brokers
    sockets = of_librdkafka + of_kafka_python
    # A worker keeps a producer for each partition of the batch that it has prepared.
    kept_sockets = cluster.waves * of_librdkafka + of_kafka_python
    return {
        "tasks at a time": cluster.tasks,
        "slots, partition by partition": cluster.tasks,
        "slots, whole batches": cluster.partitions,
        "connections to brokers, partition by partition, at most": cluster.tasks * sockets,
        "connections to brokers, whole batches, at most": cluster.tasks * kept_sockets,
        "of them to each broker, at most": cluster.tasks * kept_sockets / cluster.brokers,
        "new connections a second, at most": cluster.tasks_per_s * sockets,
        "sessions of PostgreSQL": cluster.tasks * (figures["task"][0]["database_sessions"] + 1) + 2,
        "InitProducerId a second, at most": cluster.tasks_per_s * (1 + per_transaction["InitProducerId"]),
        "EndTxn a second": cluster.tasks_per_s * per_transaction["EndTxn"],
        "all of the driver's requests for one batch": sum(one["complete_requests"].values())
        / one["count"]
        * cluster.partitions,
        "seconds to complete one batch, if each takes as long as among 1,000 here": cluster.partitions
        * one["complete_s"]
        / one["count"],
        "transactional ids that the coordinators remember (a week), at most": cluster.tasks_per_s * WEEK_S,
        "their records in the transaction log, compacted, GB, at most": cluster.tasks_per_s
        * WEEK_S
        * one["log_bytes_each"]
        / 1e9,
        "written to the transaction log, MB a day, at most": cluster.tasks_per_s
        * DAY_S
        * one["log_bytes"]
        / one["count"]
        / 1e6,
        "producer ids that each written partition remembers (a day), at most": cluster.tasks_per_s * DAY_S,
        "the longest transaction of a batch, s": cluster.waves * cluster.task_s,
    }


def transactions(ground: Ground, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Open, decide and complete; a small one first, unmeasured, so that coordinators and code are warm."""
    topic = ground.topic(PARTITIONS)
    for by_claim in (False, True):
        measure(ground, 8, topic, partitions=PARTITIONS, by_claim=by_claim)
    found = []
    for count in counts:
        legs = measure(ground, count, topic, partitions=PARTITIONS)
        before = _log_size(ground)
        legs["claim"] = measure(ground, count, topic, partitions=PARTITIONS, by_claim=True)["complete"]
        size = _log_size(ground) - before
        line: dict[str, Any] = {"count": count, "log_bytes": size}
        for name, leg in legs.items():
            line |= {f"{name}_s": leg.seconds, f"{name}_requests": dict(sorted(leg.requests.items()))}
        # Each transaction leaves several records of about one size; compaction keeps one.
        line["log_bytes_each"] = size / count / _records_each(line)
        found.append(line)
        print(
            f"{count}: opened in {line['open_s']:.2f} s, decided in {line['decide_s']:.2f} s, completed in "
            f"{line['complete_s']:.2f} s, by a claim in {line['claim_s']:.2f} s",
            flush=True,
        )
    return found


def _records_each(line: Mapping[str, Any]) -> float:
    """Records of one transaction in the log: each InitProducerId one, AddPartitionsToTxn one, EndTxn two."""
    asked = {**line["open_requests"]}
    for kind, number in line["claim_requests"].items():
        asked[kind] = asked.get(kind, 0) + number
    return (asked["InitProducerId"] + asked["AddPartitionsToTxn"] + 2 * asked["EndTxn"]) / line["count"]


def _log_size(ground: Ground) -> int:
    directories = [broker.process.directory for broker in ground.kafka_server._members]
    return sum(
        path.stat().st_size for directory in directories for path in directory.glob("data/__transaction_state-*/*.log")
    )


def task(ground: Ground, brokers: int) -> dict[str, int]:
    """Count what one task of a batch holds open while it writes, in its process and in the database."""
    engine = create_engine(ground.url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE sizing_rows (id bigint, name text)"))
    engine.dispose()
    schema = StructType().add("id", LongType()).add("name", StringType())
    options = SinkOptions(
        sink=f"sizing-{secrets.token_hex(4)}",
        kafka=ground.kafka,
        url=ground.url,
        topic=ground.topic(2 * brokers),
        table="sizing_rows",
        key="id",
    )
    layout = read_layout(options, schema)
    targets = (Target.of(options, layout),)
    batch = pa.RecordBatch.from_pydict({"id": list(range(1000)), "name": ["name"] * 1000})
    seen: dict[str, int] = {"brokers": brokers}

    def batches():
        for _ in range(5):
            yield batch
            time.sleep(SETTLE_S / 5)  # librdkafka connects when it first sends
        seen["broker_connections"] = _broker_sockets(ground)
        seen["database_sessions"] = _sessions(ground)

    rows = ((0, projected) for projected in projected_batches(batches(), schema, layout))
    prepare_partition(options, targets, "1", rows, partition=0, number=0, run=None, staging=True)
    with WholeBatch(options, "1", run_name="1") as whole:
        whole.give_up(targets)
    print(f"a task with {brokers} brokers: {seen}", flush=True)
    return seen


def _broker_sockets(ground: Ground) -> int:
    ports = {int(address.rpartition(":")[2]) for address in ground.kafka_server.bootstrap_servers.split(",")}
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port in ports
        for connection in psutil.Process().net_connections("tcp")
        if connection.raddr
    )


def _sessions(ground: Ground) -> int:
    engine = create_engine(ground.url)
    with closing(engine.connect()) as connection:
        found = connection.scalar(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
        )
    engine.dispose()
    return int(found or 0)


def render(figures: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    needs = [arithmetic(cluster, figures) for cluster in CLUSTERS]
    heads = [f"{cluster.executors:,} executors" for cluster in CLUSTERS]
    one = CLUSTERS[0]
    largest = figures["transactions"][-1]
    return "\n".join(
        [
            "# Sizing",
            "",
            "The load that Spark jobs with this library put on Kafka and PostgreSQL: measured for one task and for one "
            "transaction, then multiplied.",
            "",
            "## Calculated",
            "",
            f"Executors with {one.cores} cores, tasks of {one.task_s:.0f} s, {one.waves} partitions for each core in a batch, and "
            f"{', '.join(f'{cluster.brokers}' for cluster in CLUSTERS)} brokers. Everything scales linearly: half the cores, "
            "or tasks twice as long, give half the number.",
            "",
            f"| | {' | '.join(heads)} |",
            f"|---|{'---:|' * len(heads)}",
            *(f"| {name} | {' | '.join(_shown(need[name]) for need in needs)} |" for name in needs[0]),
            "",
            "What follows:",
            "",
            f"- **Slots.** Each is one transactional id. `max_slots` (`maxSlots`) is {DEFAULT_MAX_SLOTS:,} unless you raise it: "
            "it must be at least the number in the table. A batch that is decided as one holds a slot for each of its "
            "partitions until the decision; a batch written partition by partition holds slots only for its running tasks.",
            "- **Transactional ids.** Each claim of a slot creates a new Kafka id; the coordinators forget it after "
            "`transactional.id.expiration.ms`, a week. A Python worker that Spark reuses claims its slot once and keeps it. "
            "The numbers marked *at most* assume that no worker is reused (`keep_slots=False`, dynamic allocation that ends "
            "idle executors, pauses of more than a minute). In that case, partitions that take minutes instead of seconds are "
            "the cheapest remedy. A shorter expiration is another: set it a few hours longer than an outage may last, and "
            "longer than any transaction.",
            "- **Producer ids.** Each new Kafka id is a new producer id, and the leader of each partition that it has written "
            "remembers it for `producer.id.expiration.ms`, a day. That takes memory on the brokers for each partition that "
            "the tasks write to.",
            "- **A `DualWriter`** owns up to twice as many transactional ids as transactions that it runs at a time, less one: 15 "
            "with the default `max_lanes` of 8. Each has a row, and at most one connection to each broker, kept while the "
            "writer is open; the database connections are those of the transactions that run.",
            "- **`transaction.max.timeout.ms`** (15 minutes by default) must be longer than the longest transaction and "
            "the margin. In a batch that is decided as one, a partition's transaction lasts until the *last* partition is "
            "prepared.",
            "- **`transaction.state.log.num.partitions`** (50) spreads the ids over coordinators: the leaders of these "
            "partitions. Never change it once there are transactions. 50 is enough here, as long as every broker leads some "
            "of them.",
            "- **Connections.** While it writes, a task has librdkafka's connections to each broker, to its coordinator, and "
            "to its bootstrap broker, and the library's own, at most one to each broker. A reused worker keeps a producer for "
            "each partition of a whole batch that it has prepared, up to eight. Check `max.connections`, "
            "`max.connections.per.ip`, `max.connection.creation.rate`, and the brokers' limit of open files.",
            "- **PostgreSQL.** `max_connections` is 100 by default. A task has one session while it writes, and another once "
            "it has renewed its lease; the driver has two. A worker that waits for its next task keeps its sessions. PgBouncer "
            "in transaction pooling works. See [databases](databases.md).",
            "- **PostgreSQL, and long transactions elsewhere.** Each dual write updates the row of its lane. While a "
            "transaction in the same database, a report or `pg_dump`, has an older snapshot, every version of that row "
            "stays, and each look-up reads past them: about 30 pages of memory more for each 1,000 dual writes of the "
            "lane. A replication slot that lags, a prepared transaction that is left, and `hot_standby_feedback` do "
            "the same. `dualwrite status` warns from 1,000 versions on, and names the session. Send reports to a "
            "standby without feedback, or end them within minutes. Nothing is left of it soon after the end of the "
            "transaction. MariaDB and SQLite keep old versions where look-ups do not meet them.",
            "- **Quotas.** Brokers throttle by `request_percentage`; a driver that completes a large batch sends many small "
            "requests at once.",
            "",
            "## Measured",
            "",
            f"By `make sizing` on {figures['machine']}, with brokers and PostgreSQL on the same machine"
            f"{figures.get('remark', '')}. {PARTITIONS} partitions in each transaction, 50 partitions of the transaction log, "
            "one broker.",
            "",
            "Concurrent requests open N transactions (InitProducerId, AddPartitionsToTxn, Produce). One database transaction "
            "decides them, and they are completed as the driver of a Spark batch does it. *By a claim*: completed as the next "
            "driver does it if the first one has died.",
            "",
            "| transactions | opened, s | decided, s | completed, s | ms for each | requests to complete | requests/s | by a "
            "claim, s |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|",
            *(_transactions_line(line) for line in figures["transactions"]),
            "",
            "Each completion is proved from the log of every partition that the transaction wrote: one small request each, "
            "sixteen at a time.",
            "",
            f"![Seconds to open, decide and complete]({PICTURE.name})",
            "",
            f"Requests to complete {largest['count']:,} of them: "
            + ", ".join(f"{kind} {number:,}" for kind, number in largest["complete_requests"].items())
            + f". The transaction log grew by {largest['log_bytes'] / largest['count']:,.0f} bytes for each, opening and "
            "retiring included.",
            "",
            "One task while it writes:",
            "",
            "| brokers | connections to brokers | at most, by the formula | sessions of PostgreSQL |",
            "|---:|---:|---:|---:|",
            *(
                f"| {line['brokers']} | {line['broker_connections']} | {2 * line['brokers'] + 2} | "
                f"{line['database_sessions']} |"
                for line in figures["task"]
            ),
            "",
        ]
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:,.2g}"


def _transactions_line(line: Mapping[str, Any]) -> str:
    requests = sum(line["complete_requests"].values())
    return (
        f"| {line['count']:,} | {line['open_s']:.2f} | {line['decide_s']:.2f} | {line['complete_s']:.2f} | "
        f"{line['complete_s'] * 1000 / line['count']:.1f} | {requests:,} | {requests / line['complete_s']:,.0f} | "
        f"{line['claim_s']:.2f} |"
    )


def picture(figures: Mapping[str, Any]) -> str:
    """The picture as SVG."""
    lines = figures["transactions"]
    series = {
        word: [(line["count"], line[f"{leg}_s"]) for line in lines]
        for word, leg in (
            ("opened", "open"),
            ("decided", "decide"),
            ("completed", "complete"),
            ("completed by a claim", "claim"),
        )
    }
    return line_chart(
        series,
        linear([line["count"] for line in lines]),
        linear([seconds for points in series.values() for _, seconds in points], "{:g} s".format),
        title="N transactions at once: seconds",
        dots=True,
    )


def main() -> None:
    """Measure, unless only the page is wanted; then write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[64, 256, 1000], help="transactions at once")
    parser.add_argument(
        "--brokers", type=int, nargs="+", default=[1, 3], help="brokers of the cluster that a task sees"
    )
    parser.add_argument("--remark", default="", help="a remark about the machine, for the page")
    parser.add_argument("--page", action="store_true", help="only write the page from the figures")
    arguments = parser.parse_args()
    if not arguments.page:
        figures: dict[str, Any] = {"machine": machine(), "remark": arguments.remark, "task": []}
        for brokers in arguments.brokers:
            with servers(BROKER_DEFAULTS if brokers == 1 else None, brokers=brokers) as ground:
                figures["task"].append(task(ground, brokers))
                if brokers == 1:
                    figures["transactions"] = transactions(ground, arguments.counts)
        FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(render(figures), encoding="utf-8")
    PICTURE.write_text(picture(figures), encoding="utf-8")
    print(f"written: {PAGE.name}, {PICTURE.name}")


if __name__ == "__main__":
    main()
