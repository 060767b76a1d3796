"""``doctor``: checks everything that dual writes rest on, and says how to fix what is wrong. Changes nothing.

The rules stand in :mod:`dualwrite.protocol.findings` and its neighbours for Kafka and databases. Start-up applies the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, DualWriteError, Unavailable
from dualwrite.kafka.brokers import inherited, was_forked
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol import findings
from dualwrite.protocol.database_requirements import database_is_away
from dualwrite.protocol.findings import CLIENTS, CLOCKS, DATABASE, KAFKA, PROCESS, Check, CheckResult, Unasked
from dualwrite.protocol.kafka_requirements import Named, judge_kafka, kafka_is_away, same_cluster
from dualwrite.protocol.values import check_not_empty, check_seconds
from dualwrite.stores.sql.database import SqlDatabase, database_of, is_made_here

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from dualwrite.interfaces import Database

_AREAS: Final = (KAFKA, DATABASE, CLOCKS, CLIENTS, PROCESS)
_CLIENTS: Final = ("confluent-kafka", "kafka-python", "SQLAlchemy")
_DRIVERS: Final = {"psycopg": "psycopg", "pymysql": "pymysql", "mysqldb": "mysqlclient"}
"""By SQLAlchemy's name of a driver, the package that it comes with."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*([^;]*)")


def doctor(
    *,
    kafka: Mapping[str, object],
    database: Engine | Database | str | None = None,
    schema: str | None = None,
    topics: Collection[str] = (),
    groups: Collection[str] = (),
    writer: str | None = None,
    timeout_s: float = 30.0,
) -> Sequence[CheckResult]:
    """Check the brokers, the database, clocks, clients and this process, and say how to fix what is wrong.

    May be called at any time, from any process, with the application's own rights. Changes nothing, and is not needed for
    anything. A server that is away, or refuses a question, is a finding and no exception.

    Args:
        kafka: librdkafka configuration, as the writer has it.
        database: A SQLAlchemy engine, a database URL, or another database; None checks Kafka alone.
        schema: The database schema of the library's tables.
        topics: Topics that the writer sends to.
        groups: Consumer groups whose offsets its transactions commit.
        writer: The name of the writer, for the rights on its transactional ids, and for the cluster that its rows name.
        timeout_s: Limits the questions to each server, in seconds.

    Returns:
        The findings, in the order Kafka, database, clocks, clients, process.

    Raises:
        ConfigurationError: An argument cannot be used: an empty name, a time that is NaN or infinite.
    """
    check_seconds("timeout_s", timeout_s)
    if writer is not None:
        check_not_empty("writer", writer)
    for topic in topics:
        check_not_empty("a topic", topic)
    for group in groups:
        check_not_empty("a group", group)
    seen = _Seen()
    found = list(_kafka(kafka, Named(topics, groups, writer), timeout_s, seen))
    if database is not None:
        found += _database(database, schema, writer, timeout_s, seen)
    found += _clients(seen.driver)
    found += _process()
    return sorted(found, key=lambda finding: _AREAS.index(finding.area))


class _Seen:
    """What one area has shown that another one needs: the cluster that rows must name, and the driver in use."""

    cluster_id: str | None = None
    driver: str | None = None


def _kafka(kafka: Mapping[str, object], named: Named, timeout_s: float, seen: _Seen) -> Iterator[CheckResult]:
    from dualwrite.kafka.facts import gather  # noqa: PLC0415 - loads kafka-python, which writers do without

    try:
        config = KafkaConfig.parse(kafka)
        with KafkaCoordinator(config) as coordinator:
            facts = gather(coordinator, config, named, Deadline(timeout_s))
    except DualWriteError as error:
        yield kafka_is_away(error)
        return
    seen.cluster_id = facts.cluster_id
    yield from judge_kafka(facts)


def _database(
    given: Engine | Database | str, schema: str | None, writer: str | None, timeout_s: float, seen: _Seen
) -> Iterator[CheckResult]:
    try:
        database = database_of(given, schema)
    except ConfigurationError as error:
        yield database_is_away(error)
        return
    try:
        if isinstance(database, SqlDatabase):
            yield from _sql(database.engine, schema, writer, timeout_s, seen)
            return
        database.check()
        yield Check(DATABASE, "connection", "its commit is the decision of each dual write").ok(database.traits.name)
    except DualWriteError as error:
        yield database_is_away(error)
    finally:
        if is_made_here(given):
            database.close()


def _sql(
    engine: Engine, schema: str | None, writer: str | None, timeout_s: float, seen: _Seen
) -> Iterator[CheckResult]:
    from dualwrite.stores.sql.operators import clusters_of, look  # noqa: PLC0415 - writers do not need it

    seen.driver = engine.dialect.driver
    yield from look(engine, schema, timeout_s)
    if seen.cluster_id is not None:
        try:
            yield same_cluster(seen.cluster_id, clusters_of(engine, schema, writer))
        except Unavailable:
            return  # the findings about the connection, the tables and the grants say why


def _clients(driver: str | None) -> Iterator[CheckResult]:
    required: dict[str, str] = {}
    for line in metadata.requires("dualwrite") or ():
        match = _REQUIREMENT.match(line)
        if match is not None:
            required.setdefault(match[1].lower(), match[2].strip())
    names = [*_CLIENTS, *([_DRIVERS[driver]] if driver in _DRIVERS else [])]
    for name in names:
        yield findings.client(name, _version(name), required.get(name.lower(), ""))
    import confluent_kafka  # noqa: PLC0415 - large

    yield findings.librdkafka(confluent_kafka.libversion()[0], _version("confluent-kafka") or "")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _process() -> Iterator[CheckResult]:
    yield findings.forked(was_forked=was_forked(), inherited=inherited())
    yield findings.descriptors(*_descriptors())


def _descriptors() -> tuple[int | Unasked, int | None]:
    try:
        import resource  # noqa: PLC0415 - not on Windows

        used = len(list(Path(f"/proc/{os.getpid()}/fd" if Path("/proc/self/fd").exists() else "/dev/fd").iterdir()))
    except (ImportError, OSError) as error:
        return Unasked(f"this system does not show them: {error}"), None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return used, None if limit == resource.RLIM_INFINITY else limit
