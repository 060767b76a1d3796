"""The rules for databases: each row plants one fact in a healthy server, and names what must be found."""

from dataclasses import replace

import pytest

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.database_requirements import (
    GrantFacts,
    MariadbFacts,
    PoolerFacts,
    PostgresFacts,
    database_is_away,
    grants,
    judge_mariadb,
    judge_postgresql,
    old_versions,
)
from dualwrite.protocol.findings import Check, Status, Unasked, refuse, tables_fit

OK, UNKNOWN, WARNING, ERROR = Status.OK, Status.UNKNOWN, Status.WARNING, Status.ERROR

SETTINGS = {
    "DateStyle": "ISO, MDY",
    "default_transaction_read_only": "off",
    "fsync": "on",
    "full_page_writes": "on",
    "max_prepared_transactions": "0",
    "synchronous_commit": "on",
    "synchronous_standby_names": "",
}
DIRECT = PoolerFacts(is_between=False, shares=False, prepares=True)
POSTGRESQL = PostgresFacts((17, 2), is_standby=False, settings=SETTINGS, pooler=DIRECT)
MARIADB = MariadbFacts(
    is_mariadb=True,
    version=(11, 4),
    durability=("0", "1", "1", "1"),
    doublewrite="ON",
    charset="utf8mb4",
    sql_mode="ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES",
)


def not_ok(findings):
    return {one.check: one.status for one in findings if one.status is not OK}


def settings(**changes):
    return replace(POSTGRESQL, settings={**SETTINGS, **changes})


def test_healthy_servers_have_nothing_to_mend():
    assert not_ok(judge_postgresql(POSTGRESQL)) == {}
    assert not_ok(judge_mariadb(MARIADB)) == {}


@pytest.mark.parametrize(
    ("facts", "check", "status"),
    [
        (replace(POSTGRESQL, version=(12, 9)), "version", ERROR),
        (replace(POSTGRESQL, version=(13,)), None, None),
        (replace(POSTGRESQL, is_standby=True), "primary", ERROR),
        (settings(default_transaction_read_only="on"), "read-only", ERROR),
        (settings(DateStyle="German, DMY"), "DateStyle", ERROR),
        (settings(fsync="off"), "fsync", WARNING),
        (settings(full_page_writes="off"), "full_page_writes", WARNING),
        (settings(synchronous_commit="off"), None, None),  # the library switches it on
        (settings(synchronous_commit="local"), None, None),
        (settings(synchronous_commit="local", synchronous_standby_names="a"), "synchronous_commit", WARNING),
        (settings(synchronous_commit="remote_apply", synchronous_standby_names="a"), None, None),
        (replace(POSTGRESQL, prepared=[("young", 10.0)]), None, None),
        (replace(POSTGRESQL, prepared=[("young", 10.0), ("old", 301.0)]), "prepared transactions", WARNING),
        (replace(POSTGRESQL, idle=[("7 (psql)", 10.0)]), None, None),
        (replace(POSTGRESQL, idle=[("7 (psql)", 301.0)]), "idle in transaction", WARNING),
        (replace(POSTGRESQL, pooler=PoolerFacts(is_between=True, shares=True, prepares=True)), "pooler", WARNING),
        (replace(POSTGRESQL, pooler=PoolerFacts(is_between=True, shares=True, prepares=False)), None, None),
        (replace(POSTGRESQL, pooler=PoolerFacts(is_between=True, shares=False, prepares=True)), None, None),
        (replace(POSTGRESQL, pooler=Unasked("no second connection")), "pooler", UNKNOWN),
        (replace(POSTGRESQL, unlogged=["dualwrite_outbox"]), "logging of dualwrite_outbox", ERROR),
        (replace(POSTGRESQL, outbox=(99_999, 0, 8192)), None, None),
        (replace(POSTGRESQL, outbox=(100_000, 50_000, 8192)), None, None),
        (replace(POSTGRESQL, outbox=(100_000, 10, 8192)), "dead rows of the outbox", WARNING),
    ],
)
def test_one_fact_of_postgresql_changes_one_finding(facts, check, status):
    assert not_ok(judge_postgresql(facts)) == ({} if check is None else {check: status})


def test_a_standby_is_not_blamed_for_being_read_only():
    facts = replace(settings(default_transaction_read_only="on"), is_standby=True)
    assert not_ok(judge_postgresql(facts)) == {"primary": ERROR}


def durability(**changes):
    names = ("read_only", "flush", "log_bin", "sync_binlog")
    return replace(
        MARIADB,
        durability=tuple({**dict(zip(names, MARIADB.durability, strict=True)), **changes}[one] for one in names),
    )


@pytest.mark.parametrize(
    ("facts", "check", "status"),
    [
        (replace(MARIADB, version=(10, 5, 9)), "version", ERROR),
        (replace(MARIADB, is_mariadb=False, version=(8, 0, 16)), "version", ERROR),
        (replace(MARIADB, is_mariadb=False, version=(8, 0, 17)), None, None),
        (durability(read_only="1"), "read-only", ERROR),
        (durability(read_only="ON"), "read-only", ERROR),
        (durability(read_only="OFF"), None, None),
        (durability(flush="2"), "innodb_flush_log_at_trx_commit", ERROR),
        (durability(flush="0"), "innodb_flush_log_at_trx_commit", ERROR),
        (durability(flush="3"), None, None),
        (durability(sync_binlog="0"), "sync_binlog", ERROR),
        (durability(sync_binlog="100"), "sync_binlog", ERROR),
        (durability(sync_binlog="0", log_bin="0"), None, None),
        (replace(MARIADB, is_replica=True), "primary", ERROR),
        (replace(MARIADB, charset="latin1"), "character set", ERROR),
        (replace(MARIADB, sql_mode="ANSI_QUOTES"), "sql_mode", WARNING),
        (replace(MARIADB, sql_mode=""), "sql_mode", WARNING),
        (replace(MARIADB, sql_mode="STRICT_ALL_TABLES"), None, None),
        (replace(MARIADB, doublewrite="OFF"), "innodb_doublewrite", WARNING),
        (replace(MARIADB, other_engines={"dualwrite_slot": "Aria"}), "engine of dualwrite_slot", ERROR),
        (replace(MARIADB, prepared=["left"]), "prepared transactions", WARNING),
        (replace(MARIADB, prepared=Unasked("no right")), "prepared transactions", UNKNOWN),
        (replace(MARIADB, open_ones=[("session 7", 299.0)]), None, None),
        (replace(MARIADB, open_ones=[("session 7", 299.0), ("session 8", 300.0)]), "open transactions", WARNING),
        (replace(MARIADB, open_ones=Unasked("no right")), "open transactions", UNKNOWN),
    ],
)
def test_one_fact_of_mariadb_changes_one_finding(facts, check, status):
    assert not_ok(judge_mariadb(facts)) == ({} if check is None else {check: status})


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ("0006", OK),
        (None, ERROR),
        ("0005", WARNING),
        ("0004", ERROR),
        ("0007", OK),
        ("0007_contract", ERROR),
        ("0008", ERROR),
    ],
)
def test_tables_of_another_version_are_found(found, status):
    finding = tables_fit(found, "0006", where="the database", migrate="migrate", go_back="back")
    assert finding.status is status
    assert bool(finding.remedy) is (status is not OK)
    assert ("tables of its own version" in finding.why) is (found is not None)


MISSING = {"dualwrite_outbox": ["DELETE"]}


@pytest.mark.parametrize(
    ("is_required", "missing", "has_some", "status"),
    [
        (True, {}, True, OK),
        (True, MISSING, True, ERROR),
        (True, MISSING, False, ERROR),
        (False, {}, True, OK),
        (False, MISSING, True, WARNING),
        (False, MISSING, False, OK),
    ],
)
def test_grants_are_missed_if_all_writers_need_them_or_some_are_there(is_required, missing, has_some, status):
    assert grants(GrantFacts("messages that wait", is_required, missing, has_some, "GRANT")).status is status


@pytest.mark.parametrize(("kept", "status"), [(0, OK), (999, OK), (1000, WARNING)])
def test_many_old_versions_of_rows_are_found(kept, status):
    finding = old_versions("kafka_transaction_state", kept, lambda: "process 7")
    assert finding.status is status
    assert ("process 7" in finding.remedy) is (status is WARNING)


def test_start_up_raises_the_first_error_and_lets_warnings_pass():
    check = Check("database", "a", "why")
    refuse(check.ok("fine"), check.warning("weak", "fix"))
    with pytest.raises(ConfigurationError, match="wrong: why"):
        refuse(check.warning("weak", "fix"), check.error("wrong", "fix"), check.error("later", "fix"))


def test_a_database_that_is_away_is_an_error_with_the_reason():
    finding = database_is_away(Unavailable("refused"))
    assert (finding.status, finding.found) == (ERROR, "refused")
