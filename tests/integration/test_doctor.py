"""``dualwrite doctor`` on real servers: each test plants what is wrong for real, and reads the finding about it."""

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.acls import allow_two_phase_commit
from harness.forking import ChildEnds, ended_by, parents_alone
from harness.moved_clock import LIBRARY, needs_faketime
from harness.patience import PATIENCE_S, wait_until
from harness.pgbouncer import NEEDS_PGBOUNCER, PgBouncer
from sqlalchemy import create_engine, make_url, text

from dualwrite.cli.options import commands
from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import inherited
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.migrations import downgrade, upgrade
from dualwrite.operations import Status, doctor
from dualwrite.protocol import database_requirements
from dualwrite.stores.keyed.rocksdb import RocksDatabase
from dualwrite.stores.sql.operators import look
from dualwrite.testing import EmbeddedKafka, EmbeddedMariaDB, EmbeddedPostgres
from dualwrite.testing.servers.embedded import kafka_jars

OK, UNKNOWN, WARNING, ERROR = Status.OK, Status.UNKNOWN, Status.WARNING, Status.ERROR
NOBODY = {"bootstrap.servers": "127.0.0.1:1"}


def by_check(findings):
    return {one.check: one for one in findings}


def statuses(findings, *checks):
    found = by_check(findings)
    return [found[check].status for check in checks]


def of_database(url, **options):
    engine = create_engine(url, **options)
    try:
        return by_check(look(engine, None, 30.0))
    finally:
        engine.dispose()


# Kafka.


def test_settings_of_topics_are_found(dualwrite_kafka):
    name = f"planted-{secrets.token_hex(4)}"
    planted = {
        "cleanup.policy": "compact,delete",
        "max.message.bytes": "5000",
        "retention.ms": "60000",
        "unclean.leader.election.enable": "true",
    }
    dualwrite_kafka.create_topic(name, 2, planted)
    dualwrite_kafka.create_topic(f"{name}-plain", 2)
    kafka = dualwrite_kafka.client_config()
    checks = [f"{what} of {{}}" for what in ("compaction", "message size", "retention", "unclean election", "replicas")]
    topics = [name, f"{name}-plain", f"{name}-absent"]
    found = doctor(kafka=kafka, topics=topics)
    assert statuses(found, *(check.format(name) for check in checks)) == [WARNING] * 5
    assert statuses(found, *(check.format(topics[1]) for check in checks)) == [*[OK] * 4, WARNING]  # one broker
    assert statuses(found, *(f"topic {topic}" for topic in topics)) == [OK, OK, ERROR]
    assert statuses(found, "brokers", "version", "transaction.version", "the active controller") == [OK] * 4
    assert statuses(found, "KAFKA-20734") == [WARNING]
    [impossible] = [one for one in doctor(kafka=kafka, topics=["no topic"]) if one.check == "topic no topic"]
    assert (impossible.status, impossible.found, impossible.remedy) == (UNKNOWN, "INVALID_TOPIC_EXCEPTION", "")
    client = doctor(kafka={**kafka, "message.max.bytes": 2_000_000}, topics=topics)
    assert statuses(client, f"message size of {topics[1]}") == [WARNING]


def test_the_release_of_the_brokers_is_named(dualwrite_kafka):
    [jar] = kafka_jars().glob("kafka_*.jar")
    release = jar.stem.split("-")[1].rpartition(".")[0]
    assert by_check(doctor(kafka=dualwrite_kafka.client_config()))["version"].found == f"Kafka {release}"


def test_a_transaction_version_below_what_the_brokers_know_is_found(mortal_kafka, lowered):
    check, kafka = "transaction.version", mortal_kafka.client_config()
    assert statuses(doctor(kafka=kafka), check) == [OK]
    lowered(1)
    wait_until(lambda: statuses(doctor(kafka=kafka), check) == [WARNING])
    assert "upgrade --feature transaction.version=2" in by_check(doctor(kafka=kafka))[check].remedy


def test_the_time_limit_is_judged_as_a_writer_judges_it(dualwrite_kafka):
    check, short = "transaction.max.timeout.ms", dualwrite_kafka.client_config()
    [finding] = [one for one in doctor(kafka=short) if one.check == check]
    assert (finding.status, "900000" in finding.found, "2147483647" in finding.remedy) == (WARNING, True, True)
    assert statuses(doctor(kafka={**short, "transaction.timeout.ms": 60_000}), check) == [OK]
    assert statuses(doctor(kafka={**short, "transaction.timeout.ms": 900_001}), check) == [ERROR]


def test_each_right_is_found_missing_until_it_is_granted(guarded_kafka):
    writer, topic = f"clinic-{secrets.token_hex(4)}", f"clinic-{secrets.token_hex(4)}"
    guarded_kafka.create_topic(topic, 1)
    kafka = guarded_kafka.client_config("clinic")
    ids, rights = f"rights on ids of {writer}", f"rights on {topic}"

    def found():
        return by_check(doctor(kafka=kafka, topics=[topic], writer=writer))

    def granted(operation, kind, name, check, status, *, prefixed=False):
        guarded_kafka.allow("clinic", operation, kind, name, prefixed=prefixed)
        wait_until(lambda: found()[check].status is status)

    before = found()
    assert [before[check].status for check in (ids, f"topic {topic}", "two-phase commit", "the active controller")] == [
        *(ERROR, UNKNOWN, UNKNOWN, UNKNOWN)
    ]
    assert "DescribeConfigs on the cluster" in before["transaction.max.timeout.ms"].remedy
    # One lane's ids are not all: those of the others begin with the name and "#".
    granted("write", "transactional_id", f"{writer}.", ids, ERROR, prefixed=True)
    granted("describe", "transactional_id", writer, ids, ERROR, prefixed=True)
    assert "Write" in found()[ids].found
    granted("write", "transactional_id", writer, ids, OK, prefixed=True)
    granted("write", "topic", topic, rights, ERROR)
    assert found()[rights].found == "missing: Read"
    granted("read", "topic", topic, rights, OK)
    assert found()[f"settings of {topic}"].status is UNKNOWN
    granted("describe_configs", "topic", topic, f"compaction of {topic}", OK)
    granted("describe_configs", "broker", "kafka-cluster", "two-phase commit", OK)
    granted("describe", "broker", "kafka-cluster", "the active controller", OK)
    with KafkaCoordinator(KafkaConfig.parse(guarded_kafka.admin_config())) as coordinator:
        assert coordinator.list_ids(writer, Deadline(PATIENCE_S)) == []  # asking has made none


def test_rights_on_groups_and_for_a_restore_are_found_missing_until_they_are_granted(guarded_kafka):
    name = f"clinic-{secrets.token_hex(4)}"
    user, kafka = "clinic", guarded_kafka.client_config("clinic")
    group, offsets, restore = (
        f"rights on the group {name}",
        "rights on __consumer_offsets",
        "rights for a recovery after a restore",
    )
    guarded_kafka.allow(user, "write", "transactional_id", name, prefixed=True)
    settings = {**guarded_kafka.admin_config(), "group.id": f"{name}-other"}
    # The first use of a group makes the topic of offsets, and may find no coordinator yet.
    with closing(Consumer(settings)) as consumer, suppress(KafkaException):
        consumer.committed([TopicPartition("any", 0)], PATIENCE_S)

    def found():
        return by_check(doctor(kafka=kafka, groups=[name], writer=name))

    def granted(operation, kind, on, check, status, *, prefixed=False):
        guarded_kafka.allow(user, operation, kind, on, prefixed=prefixed)
        wait_until(lambda: found()[check].status is status)

    before = found()
    assert [before[check].status for check in (group, offsets, restore)] == [ERROR, WARNING, WARNING]
    assert before[restore].found == "missing: Describe on __transaction_state, Describe on ids dualwrite-probe.*"
    granted("describe", "group", name, group, ERROR)
    granted("read", "group", name, group, OK)
    granted("describe", "topic", "__consumer_offsets", offsets, WARNING)
    granted("read", "topic", "__consumer_offsets", offsets, OK)
    granted("describe", "topic", "__transaction_state", restore, WARNING)
    granted("describe", "transactional_id", "dualwrite-probe.", restore, OK, prefixed=True)
    admin = AdminClient(guarded_kafka.admin_config())
    listed = admin.list_consumer_groups(request_timeout=PATIENCE_S).result()
    assert name not in {one.group_id for one in listed.valid}  # asking has made none


def test_the_right_to_two_phase_commit_is_found(two_phase_kafka):
    writer = f"clinic-{secrets.token_hex(4)}"
    kafka = two_phase_kafka.client_config("clinic")
    two_phase_kafka.allow("clinic", "write", "transactional_id", writer, prefixed=True)
    two_phase_kafka.allow("clinic", "describe_configs", "broker", "kafka-cluster")
    checks = ("two-phase commit", "transaction.max.timeout.ms")
    wait_until(lambda: statuses(doctor(kafka=kafka, writer=writer), *checks) == [WARNING, WARNING])
    for name in (writer, f"{writer}#1"):
        allow_two_phase_commit(two_phase_kafka.admin_config(), "clinic", f"{name}.doctor")
    assert statuses(doctor(kafka=kafka, writer=writer), *checks) == [WARNING, WARNING]  # not for its waiting messages
    allow_two_phase_commit(two_phase_kafka.admin_config(), "clinic", f"{writer}#outbox.doctor")
    wait_until(lambda: statuses(doctor(kafka=kafka, writer=writer), *checks) == [OK, OK])
    with KafkaCoordinator(KafkaConfig.parse(two_phase_kafka.admin_config())) as coordinator:
        assert coordinator.list_ids(writer, Deadline(PATIENCE_S)) == []


def test_nobody_who_answers_and_settings_that_cannot_be_used_are_findings():
    [silent] = [one for one in doctor(kafka=NOBODY, timeout_s=0.5) if one.area == "Kafka"]
    assert (silent.check, silent.status) == ("brokers", ERROR)
    [refused] = [one for one in doctor(kafka={**NOBODY, "security.protocol": "nonsense"}) if one.area == "Kafka"]
    assert (refused.status, "security.protocol" in refused.found) == (ERROR, True)


@pytest.mark.slow
def test_a_broker_that_is_suspended_and_replicas_that_are_behind_are_found():
    settings = {"transaction.max.timeout.ms": "2147483647", "replica.lag.time.max.ms": "2000"}
    with EmbeddedKafka(settings, brokers=3) as cluster:
        topic = cluster.create_topic("orders", 3)
        kafka, replicas = cluster.client_config(), "replicas of orders"
        found = by_check(doctor(kafka=kafka, topics=[topic], writer="orders"))
        assert {check: one.found for check, one in found.items() if one.status is not OK} == {}
        assert "3 of cluster" in found["brokers"].found
        cluster.suspend(2)
        try:
            [silent] = [one for one in doctor(kafka=kafka, topics=[topic]) if one.check == "brokers"]
            assert (silent.status, silent.found.startswith("1 of 3 brokers do not answer: 2 at ")) == (ERROR, True)
            wait_until(lambda: by_check(doctor(kafka=kafka, topics=[topic]))[replicas].status is WARNING)
        finally:
            cluster.resume(2)


# PostgreSQL.


@pytest.fixture(scope="module")
def careless():
    """A server with settings that lose what it has committed."""
    settings = {
        "fsync": "off",
        "full_page_writes": "off",
        "max_prepared_transactions": "5",
        "synchronous_commit": "local",
        "synchronous_standby_names": "nobody",
    }
    with EmbeddedPostgres(settings) as server:
        yield server


@contextmanager
def migrated(server):
    url = server.create_database()
    engine = create_engine(url)
    with engine.connect() as connection:
        upgrade(connection)
    engine.dispose()
    yield url


def test_settings_of_postgresql_that_lose_commits_are_found(careless, migrated_database):
    checks = ("fsync", "full_page_writes", "synchronous_commit")
    with migrated(careless) as url:
        assert [of_database(url)[check].status for check in checks] == [WARNING] * 3
    healthy = of_database(migrated_database)
    assert {check: one.found for check, one in healthy.items() if one.status is not OK} == {}


def test_what_is_left_open_in_postgresql_is_found(careless, monkeypatch):
    """A prepared transaction and an idle one: younger than the limit, which is lowered for the test."""
    with migrated(careless) as url:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, engine.connect() as idle:
            for statement in ("BEGIN", "CREATE TABLE left_open (id int)", "PREPARE TRANSACTION 'forgotten'"):
                connection.exec_driver_sql(statement)
            idle.exec_driver_sql("BEGIN")
            idle.exec_driver_sql("SELECT 1")
            checks = ("prepared transactions", "idle in transaction")
            assert [of_database(url)[check].status for check in checks] == [OK, OK]
            monkeypatch.setattr(database_requirements, "_OLD_S", 0.0)
            found = of_database(url)
            assert [found[check].status for check in checks] == [WARNING, WARNING]
            assert "'forgotten'" in found["prepared transactions"].found
            connection.exec_driver_sql("ROLLBACK PREPARED 'forgotten'")
            idle.exec_driver_sql("ROLLBACK")
            assert [of_database(url)[check].status for check in checks] == [OK, OK]
        engine.dispose()


def test_a_server_that_takes_no_more_prepared_transactions_is_found(careless):
    check = "prepared transactions"
    with EmbeddedPostgres({"max_prepared_transactions": "0"}) as server, migrated(server) as url:
        none = of_database(url)[check]
    assert (none.status, "prepared mode is not to be had" in none.found) == (OK, True)
    with migrated(careless) as url:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for number in range(5):
                for statement in ("BEGIN", "SELECT pg_current_xact_id()", f"PREPARE TRANSACTION 'young-{number}'"):
                    connection.exec_driver_sql(statement)
            full = of_database(url)[check]
            assert (full.status, full.found.startswith("5 of at most 5")) == (WARNING, True)
            connection.exec_driver_sql("ROLLBACK PREPARED 'young-0'")
            assert of_database(url)[check].status is OK
            for number in range(1, 5):
                connection.exec_driver_sql(f"ROLLBACK PREPARED 'young-{number}'")
        engine.dispose()


def test_a_table_that_is_emptied_after_a_crash_is_found(migrated_database):
    engine = create_engine(migrated_database)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE dualwrite_outbox SET UNLOGGED")
    engine.dispose()
    [finding] = [one for one in of_database(migrated_database).values() if one.check.startswith("logging")]
    assert (finding.status, "dualwrite_outbox" in finding.remedy) == (ERROR, True)


def test_times_that_psycopg_cannot_read_are_found(migrated_database):
    found = of_database(migrated_database, connect_args={"options": "-c datestyle=sql,dmy"})
    assert {check: one.found for check, one in found.items() if one.status is not OK} == {
        "DateStyle": "the session's DateStyle is 'SQL, DMY'"
    }


def test_a_standby_and_a_read_only_role_are_found(migrated_database):
    read_only = of_database(migrated_database, connect_args={"options": "-c default_transaction_read_only=on"})
    assert read_only["read-only"].status is ERROR
    assert read_only["grants for a writer"].status is UNKNOWN
    with EmbeddedPostgres({"primary_conninfo": ""}) as server, migrated(server) as url:
        server.stop()
        (server._process.directory / "data" / "standby.signal").touch()
        server.start()
        found = of_database(url)
        assert [found[check].status for check in ("primary", "grants for a writer", "tables")] == [ERROR, UNKNOWN, OK]


@pytest.mark.parametrize(("revision", "status"), [("0007", WARNING), ("0006", ERROR), ("base", ERROR)])
def test_tables_of_another_version_are_found(migrated_database, revision, status):
    engine = create_engine(migrated_database)
    with engine.connect() as connection:
        downgrade(connection, revision)
    engine.dispose()
    found = of_database(migrated_database)
    assert found["tables"].status is status
    assert "dualwrite migrate" in found["tables"].remedy
    assert ("grants for a writer" in found) is (status is WARNING)


def test_missing_grants_are_found_and_given_by_what_the_finding_says(migrated_database):
    engine = create_engine(migrated_database, isolation_level="AUTOCOMMIT")
    role = f"clinic_{secrets.token_hex(4)}"

    def as_role():
        found = of_database(migrated_database, connect_args={"options": f"-c role={role}"})
        return {check.removeprefix("grants for "): one for check, one in found.items() if check.startswith("grants")}

    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role}")
        try:
            connection.exec_driver_sql(f"GRANT SELECT ON dualwrite_version TO {role}")
            none = as_role()
            assert {purpose: one.status for purpose, one in none.items() if one.status is not OK} == {"a writer": ERROR}
            connection.exec_driver_sql(f"GRANT SELECT, INSERT ON dualwrite_outbox TO {role}")
            part = as_role()["messages that wait"]
            assert part.status is WARNING
            assert "DELETE on dualwrite_outbox," in part.found
            for finding in (none["a writer"], part):
                for statement in finding.remedy.partition(": ")[2].replace('"postgres"', role).split("; "):
                    connection.exec_driver_sql(statement)
            assert {one.status for one in as_role().values()} == {OK}
            assert as_role()["messages that wait"].found == "all granted"
            connection.exec_driver_sql(f"REVOKE UPDATE ON kafka_transaction_state FROM {role}")
            assert as_role()["a writer"].found == "missing: UPDATE on kafka_transaction_state"
        finally:
            connection.exec_driver_sql(f"DROP OWNED BY {role}")
            connection.exec_driver_sql(f"DROP ROLE {role}")
    engine.dispose()


@NEEDS_PGBOUNCER
@pytest.mark.parametrize(
    ("mode", "options", "status", "words"),
    [
        ("transaction", {}, WARNING, "shares sessions by transaction"),
        ("transaction", {"connect_args": {"prepare_threshold": None}}, OK, "shares sessions by transaction"),
        ("session", {}, OK, "keeps the session"),
    ],
)
def test_a_pooler_is_found_with_its_mode(migrated_database, tmp_path, mode, options, status, words):
    assert of_database(migrated_database)["pooler"].found == "none is seen"
    with PgBouncer(tmp_path, migrated_database, pool_mode=mode) as bouncer:
        finding = of_database(bouncer.url, **options)["pooler"]
    assert (finding.status, words in finding.found) == (status, True)


def test_rows_of_another_cluster_are_found(dualwrite_kafka, migrated_database):
    kafka = dualwrite_kafka.client_config()
    engine = create_engine(migrated_database)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO kafka_transaction_state (transactional_id, namespace, incarnation, settled_incarnation, "
                "cluster_id, owner) VALUES ('orders#1', 'a', 1, 1, 'elsewhere', 'me')"
            )
        )
    engine.dispose()
    check = "cluster of the rows"
    for writer in ("orders", None):
        assert statuses(doctor(kafka=kafka, database=migrated_database, writer=writer), check) == [ERROR]
    assert statuses(doctor(kafka=kafka, database=migrated_database, writer="bills"), check) == [OK]


def test_a_database_that_is_away_or_refuses_us_is_a_finding(migrated_database):
    gone = make_url(migrated_database).set(port=1)
    absent = make_url(migrated_database).set(database="nowhere")
    for url in (gone, absent):
        [finding] = of_database(url).values()
        assert (finding.check, finding.status) == ("connection", ERROR)
        assert make_url(migrated_database).password not in str(finding)
    [finding] = [one for one in doctor(kafka=NOBODY, database="nonsense", timeout_s=0.1) if one.area == "database"]
    assert (finding.status, "cannot be used" in finding.found) == (ERROR, True)


# MariaDB, and the others.


@pytest.fixture(scope="module")
def mariadb():
    with EmbeddedMariaDB({"log-bin": "binlog", "sync-binlog": "1"}) as server, migrated(server) as url:
        yield url


def test_a_healthy_mariadb_has_nothing_to_mend(mariadb):
    assert {check: one.found for check, one in of_database(mariadb).items() if one.status is not OK} == {}


@pytest.mark.parametrize(
    ("plant", "repair", "check", "status"),
    [
        (
            "SET GLOBAL innodb_flush_log_at_trx_commit = 2",
            "SET GLOBAL innodb_flush_log_at_trx_commit = 1",
            "innodb_flush_log_at_trx_commit",
            ERROR,
        ),
        ("SET GLOBAL sync_binlog = 0", "SET GLOBAL sync_binlog = 1", "sync_binlog", ERROR),
        ("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0", "read-only", ERROR),
        ("SET GLOBAL sql_mode = 'ANSI_QUOTES'", "SET GLOBAL sql_mode = DEFAULT", "sql_mode", WARNING),
        (
            "ALTER TABLE dualwrite_slot ENGINE=Aria",
            "ALTER TABLE dualwrite_slot ENGINE=InnoDB",
            "engine of dualwrite_slot",
            ERROR,
        ),
        ("XA START 'left'; XA END 'left'; XA PREPARE 'left'", "XA ROLLBACK 'left'", "prepared transactions", WARNING),
    ],
)
def test_what_is_wrong_with_mariadb_is_found(mariadb, plant, repair, check, status):
    engine = create_engine(mariadb, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in plant.split("; "):
            connection.exec_driver_sql(statement)
        try:
            assert of_database(mariadb)[check].status is status
        finally:
            connection.exec_driver_sql(repair)
    engine.dispose()
    assert of_database(mariadb).get(check) is None or of_database(mariadb)[check].status is OK


def test_a_transaction_that_stays_open_in_mariadb_is_found(mariadb, monkeypatch):
    engine = create_engine(mariadb, isolation_level="AUTOCOMMIT")
    check = "open transactions"
    with engine.connect() as connection:
        connection.exec_driver_sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        number = connection.exec_driver_sql("SELECT connection_id()").scalar()
        assert of_database(mariadb)[check].status is OK  # it is young
        monkeypatch.setattr(database_requirements, "_OLD_S", 0.0)
        wait_until(lambda: of_database(mariadb)[check].status is WARNING)
        assert f"session {number} " in of_database(mariadb)[check].found
        connection.exec_driver_sql("ROLLBACK")
        wait_until(lambda: of_database(mariadb)[check].status is OK)
    engine.dispose()


def test_missing_grants_of_mariadb_are_found(mariadb):
    url = make_url(mariadb)
    engine = create_engine(mariadb, isolation_level="AUTOCOMMIT")
    poor = url.set(username="clinic", password="clinic")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE OR REPLACE USER clinic IDENTIFIED BY 'clinic'")
        for right in ("SELECT ON dualwrite_version", "SELECT, INSERT ON kafka_transaction_state"):
            connection.exec_driver_sql(f"GRANT {right} TO clinic")
        try:
            lacking = of_database(poor)["grants for a writer"]
            assert lacking.status is ERROR
            assert "UPDATE on kafka_transaction_state" in lacking.found
            unseen = of_database(poor)["open transactions"]
            assert (unseen.status, unseen.remedy) == (UNKNOWN, "grant PROCESS to see them")
            for statement in lacking.remedy.partition(": ")[2].split("; "):
                connection.execute(text(statement))
            assert of_database(poor)["grants for a writer"].status is OK
        finally:
            connection.exec_driver_sql("DROP USER clinic")
    engine.dispose()


def test_sqlite_is_checked_as_a_claim_checks_it(tmp_path):
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with create_engine(url).connect() as connection:
        upgrade(connection)
    found = of_database(url)
    assert [found[check].status for check in ("tables", "settings")] == [OK, OK]
    engine = create_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
        connection.commit()
    assert by_check(look(engine, None, 30.0))["settings"].status is ERROR
    engine.dispose()


def test_databases_without_sql_are_opened(tmp_path):
    pytest.importorskip("rocksdict", reason="the extra 'rocksdb' is not installed")
    url = f"rocksdb://{tmp_path / 'rocks'}"
    assert statuses(doctor(kafka=NOBODY, database=url, timeout_s=0.1), "connection") == [ERROR]
    assert not (tmp_path / "rocks").exists()
    RocksDatabase(tmp_path / "rocks").close()
    assert statuses(doctor(kafka=NOBODY, database=url, timeout_s=0.1), "connection") == [OK]


# The process, the clocks, and the command.


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_writer_that_came_through_a_fork_is_found(writer):
    assert statuses(doctor(kafka=NOBODY, timeout_s=0.1), "fork") == [OK]
    assert writer.transactional_id
    with parents_alone():
        child = os.fork()
        if child == 0:
            [found] = [one for one in doctor(kafka=NOBODY, timeout_s=0.1) if one.check == "fork"]
            raise ChildEnds if found.status is ERROR and inherited() else AssertionError
        assert ended_by(child) == "ChildEnds"


AFTER_LOADING = "this process was forked after it had loaded the library, and before it opened a writer"
GUNICORNS_APPLICATION = """
import json, os
from dualwrite import DualWriteError, DualWriter
from dualwrite.operations import doctor

kafka = {"bootstrap.servers": os.environ["KAFKA"]}


def make():
    return DualWriter("shop", kafka=kafka, database=os.environ["DATABASE"])


writer = None if os.environ["CASE"] == "in the worker" else make()
if os.environ["CASE"] == "opened before the fork":
    writer.open()


def application(environ, start_response):
    global writer
    writer, block = writer or make(), "committed"
    try:
        if os.environ["CASE"] != "opened before the fork":
            writer.open()
    except DualWriteError as error:
        block = f"not opened: {error}"
    else:
        try:
            with writer.transaction() as tx:
                tx.produce(os.environ["TOPIC"], value="1")
        except DualWriteError as error:
            block = f"refused: {error}"
    [found] = [one for one in doctor(kafka=kafka, timeout_s=10.0) if one.check == "fork"]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([found.status.value, found.found, found.remedy, block]).encode()]
"""


@pytest.mark.parametrize(
    ("preload", "case", "status", "words", "block"),
    [
        (
            True,
            "opened before the fork",
            ERROR,
            "writers or coordinators were opened before",
            "refused: shop: the writer was made in",
        ),
        (True, "made before the fork", OK, AFTER_LOADING, "not opened: shop: the writer was made in another process"),
        (True, "in the worker", OK, AFTER_LOADING, "committed"),
        (False, "in the worker", OK, "this process has loaded the library itself", "committed"),
    ],
)
def test_a_worker_of_gunicorn_says_whether_its_writer_came_through_the_fork(
    dualwrite_kafka, migrated_database, dualwrite_topic, tmp_path, preload, case, status, words, block
):
    (tmp_path / "shop.py").write_text(GUNICORNS_APPLICATION)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    environment = {
        "KAFKA": dualwrite_kafka.bootstrap_servers,
        "DATABASE": migrated_database,
        "TOPIC": dualwrite_topic,
        "CASE": case,
    }
    log = tmp_path / "log"
    with log.open("w") as said:
        gunicorn = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-b", f"127.0.0.1:{port}", *(["--preload"] if preload else []), "shop"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "Booting worker" in log.read_text() or gunicorn.poll() is not None, otherwise=log.read_text)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            found = json.load(answer)
    finally:
        gunicorn.terminate()
        gunicorn.wait(PATIENCE_S)
    assert (found[0], words in found[1], "post_fork" in found[2]) == (status.value, True, status is ERROR), found
    assert found[3].startswith(block)


def test_the_clients_that_are_installed_and_the_descriptors_that_are_left_are_found(migrated_database):
    def found():
        return by_check(doctor(kafka=NOBODY, database=migrated_database, timeout_s=0.1))

    clients = [one for one in found().values() if one.area == "clients"]
    assert {one.check: one.status for one in clients} == dict.fromkeys(
        ["confluent-kafka", "kafka-python", "SQLAlchemy", "psycopg", "librdkafka"], OK
    )
    assert all(one.found.split()[0] == version(one.check) for one in clients if one.check != "librdkafka")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found()["file descriptors"].status is OK
    taken = [os.dup(2) for _ in range(300)]
    try:
        used = int(found()["file descriptors"].found.split()[0])
        assert used > len(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, hard))
        assert found()["file descriptors"].status is WARNING
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in taken:
            os.close(one)


@needs_faketime
def test_a_clock_that_is_ahead_is_found(dualwrite_kafka, migrated_database):
    program = "import dualwrite.cli; dualwrite.cli.main()"
    arguments = ["doctor", "--json", "--bootstrap-server", dualwrite_kafka.bootstrap_servers]
    for offset, status in (("+60s", ["warning"] * 2), ("+2h", ["error", "warning"])):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={
                **os.environ,
                "DUALWRITE_DATABASE_URL": migrated_database,
                "LD_PRELOAD": str(LIBRARY),
                "FAKETIME": offset,
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            },
            capture_output=True,
            check=False,
            text=True,
        )
        found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
        assert [found[check]["status"] for check in ("the active controller", "the database")] == status


def test_the_command_tells_by_its_exit_code(dualwrite_kafka, migrated_database, dualwrite_topic):
    def run(*arguments, **environment):
        given = ["doctor", "--bootstrap-server", dualwrite_kafka.bootstrap_servers, *arguments]
        return CliRunner().invoke(commands, given, env=environment)

    database = {"DUALWRITE_DATABASE_URL": migrated_database}
    shown = run("--topic", dualwrite_topic, "--writer", "orders", **database)
    assert shown.exit_code == 0, shown.output
    assert "set transaction.max.timeout.ms=2147483647 on the brokers" in shown.output
    assert "grants for a writer" in shown.output
    assert run("--topic", dualwrite_topic, "--strict", **database).exit_code == 1
    wrong = run("--topic", "absent", "--strict", "--json", **database)
    document = json.loads(wrong.output)
    assert (wrong.exit_code, document["status"]) == (2, "error")
    [absent] = [one for one in document["findings"] if one["check"] == "topic absent"]
    assert set(absent) == {"area", "check", "status", "found", "why", "remedy"}
    assert (absent["area"], absent["status"]) == ("Kafka", "error")
    assert not [one for one in json.loads(run("--json").output)["findings"] if one["area"] == "database"]
    assert make_url(migrated_database).password not in shown.output + wrong.output
    assert run("--writer", "").exit_code == 2
