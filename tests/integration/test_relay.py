"""``dualwrite relay``: an outbox table that another program fills, sent once and in order, whatever dies."""

import json
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from harness.forking import processes
from harness.patience import PATIENCE_S, wait_until
from sqlalchemy import create_engine, text

from dualwrite.cli.options import commands
from dualwrite.errors import ConfigurationError, TransactionAborted
from dualwrite.protocol.outbox_table import OutboxTable, Placement
from dualwrite.stores.sql import outbox
from dualwrite.stores.sql.leases import read_leases
from dualwrite.stores.sql.outbox_table import ISOLATION, OutboxTableRows
from dualwrite.testing.checker import read_committed
from dualwrite.writing.relay import Relay

KINDS = ["postgresql", "mariadb", "sqlite"]
on_all = pytest.mark.parametrize("url", KINDS, indirect=True)
on_postgresql = pytest.mark.parametrize("url", ["postgresql"], indirect=True)

DEBEZIUM = {
    "postgresql": "id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) NOT NULL,"
    " aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb,"
    " seq bigint GENERATED ALWAYS AS IDENTITY UNIQUE",
    "mysql": "id varchar(36) PRIMARY KEY DEFAULT (uuid()), aggregatetype varchar(255) NOT NULL,"
    " aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload longtext,"
    " seq bigint NOT NULL AUTO_INCREMENT UNIQUE",
    "sqlite": "id varchar(36) DEFAULT (lower(hex(randomblob(16)))), aggregatetype varchar(255) NOT NULL,"
    " aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload text,"
    " seq integer PRIMARY KEY AUTOINCREMENT",
}


@pytest.fixture
def database(url, engine_of):
    """An engine of a migrated database, in which a test makes its own tables."""
    found = engine_of(url)
    run(found, "DROP TABLE IF EXISTS outbox_events")
    return found


@pytest.fixture
def table(database):
    """An outbox table in Debezium's layout, with a sequence besides."""
    kind = "mysql" if database.dialect.name in {"mysql", "mariadb"} else database.dialect.name
    run(database, f"CREATE TABLE outbox_events ({DEBEZIUM[kind]})")
    return "outbox_events"


def run(engine, *statements):
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def put(engine, topic, key, payload):
    with engine.begin() as connection:
        put_in(connection, topic, key, payload)


def put_in(connection, topic, key, payload):
    connection.execute(
        text("INSERT INTO outbox_events (aggregatetype, aggregateid, type, payload) VALUES (:t, :k, 'made', :p)"),
        {"t": topic, "k": key, "p": payload},
    )


def count(engine, where="true"):
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT count(*) FROM outbox_events WHERE {where}"))


def mapped(**changed):
    return OutboxTable(**{"topic": "${routedByValue}", "order_by": ["seq"], **changed})


def make(kafka, database, layout=None, **options):
    return Relay(layout or mapped(), kafka=kafka, database=database, **options)


@contextmanager
def running(relay):
    """The relay in a thread of its own, stopped at the end."""
    errors = []

    def work():
        try:
            relay.run()
        except Exception as error:  # noqa: BLE001 - shown by the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        relay.stop()
        thread.join(PATIENCE_S)
    assert not errors
    assert not thread.is_alive()


@on_all
def test_rows_become_messages_once_in_order_and_are_deleted(kafka, database, table, dualwrite_topic):
    for number in range(700):
        if number % 100 == 0:
            connection = database.connect()
            connection.begin()
        put_in(connection, dualwrite_topic, f"key-{number % 5}", json.dumps({"number": number}))
        if number % 100 == 99:
            connection.commit()
            connection.close()
    ids = {}
    with database.connect() as connection:
        for row in connection.execute(text("SELECT id, payload FROM outbox_events")):
            payload = row.payload if isinstance(row.payload, dict) else json.loads(row.payload)
            ids[payload["number"]] = str(row.id)
    report = make(kafka, database).run(once=True)
    assert report.messages == 700
    assert report.state == "stopped"
    assert count(database) == 0
    found = read_committed(kafka, dualwrite_topic)
    by_key = {}
    for record in found:
        number = json.loads(record.value)["number"]
        assert record.headers == (("id", ids[number].encode()),)
        by_key.setdefault(record.key, []).append(number)
    assert by_key == {f"key-{key}".encode(): list(range(key, 700, 5)) for key in range(5)}


@on_all
def test_marked_rows_stay_and_are_sent_once(kafka, database, table, dualwrite_topic):
    kind = "datetime" if database.dialect.name != "postgresql" else "timestamptz"
    run(
        database,
        f"ALTER TABLE outbox_events ADD COLUMN sent_at {kind}",
        "ALTER TABLE outbox_events ADD COLUMN sent boolean",
    )
    for _ in range(2):
        put(database, dualwrite_topic, "k", "1")
    assert make(kafka, database, mapped(mark="sent_at")).run(once=True).messages == 2
    put(database, dualwrite_topic, "k", "3")
    assert make(kafka, database, mapped(mark="sent_at")).run(once=True).messages == 1
    assert make(kafka, database, mapped(mark="sent")).run(once=True).messages == 3
    assert make(kafka, database, mapped(mark="sent")).run(once=True).messages == 0
    assert count(database) == count(database, "sent AND sent_at IS NOT NULL") == 3
    assert len(read_committed(kafka, dualwrite_topic)) == 6


@on_postgresql
def test_a_row_with_a_lower_number_that_appears_later_is_sent(kafka, database, table, dualwrite_topic):
    slow = database.connect()
    slow.begin()
    put_in(slow, dualwrite_topic, "slow", "1")
    put(database, dualwrite_topic, "quick", "2")
    assert make(kafka, database).run(once=True).messages == 1
    slow.commit()
    slow.close()
    put(database, dualwrite_topic, "slow", "3")
    assert make(kafka, database).run(once=True).messages == 2
    found = read_committed(kafka, dualwrite_topic)
    assert [record.value for record in found if record.key == b"slow"] == [b"1", b"3"]


@on_postgresql
def test_a_round_takes_no_row_that_it_has_not_read(kafka, database, table, dualwrite_topic, monkeypatch):
    """Rows that are committed between the two statements, with numbers in between, wait for the next round."""
    slow = database.connect()
    slow.begin()
    put_in(slow, dualwrite_topic, "late", "2")
    put(database, dualwrite_topic, "k", "3")
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_events (aggregatetype, aggregateid, type, payload, seq)"
                " OVERRIDING SYSTEM VALUE VALUES (:t, 'k', 'made', '1', 0)"
            ),
            {"t": dualwrite_topic},
        )
    relay, removed = make(kafka, database), []
    remove = OutboxTableRows.remove

    def late(self, connection, rows):
        if not removed:
            slow.commit()
        removed.append(len(rows))
        remove(self, connection, rows)

    monkeypatch.setattr(OutboxTableRows, "remove", late)
    assert relay.run(once=True).messages == 2
    slow.close()
    assert count(database) == 1
    assert make(kafka, database).run(once=True).messages == 1
    assert removed == [2, 1]
    assert sorted(record.value for record in read_committed(kafka, dualwrite_topic)) == [b"1", b"2", b"3"]


@on_all
def test_every_mapping_option(kafka, database, dualwrite_topic):
    binary = {"postgresql": "bytea", "sqlite": "blob"}.get(database.dialect.name, "longblob")
    serial = {
        "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "sqlite": "integer PRIMARY KEY AUTOINCREMENT",
    }.get(database.dialect.name, "bigint AUTO_INCREMENT PRIMARY KEY")
    run(
        database,
        f"CREATE TABLE outbox_events (n {serial}, stream varchar(50), k varchar(50), body {binary}, extra text,"
        " part integer, made_ms bigint, kind varchar(20), version integer)",
    )
    with database.begin() as connection:
        insert = text(
            "INSERT INTO outbox_events (stream, k, body, extra, part, made_ms, kind, version)"
            " VALUES (:stream, :k, :body, :extra, :part, :ms, :kind, :version)"
        )
        common = {"stream": "x", "kind": "made", "version": 3}
        connection.execute(
            insert,
            [
                {
                    **common,
                    "k": "a",
                    "body": b"\x00\xff",
                    "extra": '{"h": "v", "n": 1, "z": null}',
                    "part": 1,
                    "ms": 1000,
                },
                {**common, "k": None, "body": None, "extra": '[["h", "1"], ["h", "2"]]', "part": 0, "ms": None},
                {**common, "k": "c", "body": b"", "extra": None, "part": None, "ms": 2000},
            ],
        )
    layout = OutboxTable(
        topic=dualwrite_topic,
        key_column="k",
        value_column="body",
        id_column=None,
        headers_column="extra",
        partition_column="part",
        timestamp_column="made_ms",
        placements=[Placement.parse("kind:header:type"), Placement.parse("version:header")],
        tombstone_on_empty=True,
    )
    assert make(kafka, database, layout).run(once=True).messages == 3
    found = {record.key: record for record in read_committed(kafka, dualwrite_topic)}
    placed = (("type", b"made"), ("version", b"3"))
    assert found[b"a"][0] == 1
    assert found[b"a"].value == b"\x00\xff"
    assert found[b"a"].headers == (*placed, ("h", b"v"), ("n", b"1"), ("z", None))
    assert found[None][0] == 0
    assert (found[None].value, found[None].headers) == (None, (*placed, ("h", b"1"), ("h", b"2")))
    assert (found[b"c"].value, found[b"c"].headers) == (None, placed)


@on_postgresql
def test_an_envelope_as_debezium_makes_it(kafka, database, table, dualwrite_topic):
    put(database, dualwrite_topic, "k", '{"a": 1}')
    put(database, dualwrite_topic, "k", None)
    placements = [Placement.parse("type:envelope:eventType"), Placement.parse("seq:envelope")]
    make(kafka, database, mapped(placements=placements)).run(once=True)
    put(database, dualwrite_topic, "k", '{"a": 1}')
    make(kafka, database, mapped(placements=placements, expand_json=True)).run(once=True)
    assert [json.loads(record.value) for record in read_committed(kafka, dualwrite_topic)] == [
        {"payload": '{"a": 1}', "eventType": "made", "seq": 1},
        {"payload": None, "eventType": "made", "seq": 2},
        {"payload": {"a": 1}, "eventType": "made", "seq": 3},
    ]


@on_postgresql
@pytest.mark.parametrize("rows", [20, 600])
def test_rows_of_several_topics_and_types_without_a_unique_order(
    kafka, database, dualwrite_kafka, dualwrite_topic, rows, tmp_path
):
    """A time orders the rows: those of one time are told apart by their place in the table."""
    run(
        database,
        "CREATE TABLE outbox_events (id uuid DEFAULT gen_random_uuid(), aggregatetype text, aggregateid uuid, payload text,"
        " created_at timestamptz)",
        "CREATE INDEX ON outbox_events (created_at)",
    )
    other = dualwrite_kafka.create_topic(f"{dualwrite_topic}-other", 1)
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_events (aggregatetype, aggregateid, payload, created_at)"
                " SELECT CASE WHEN i % 2 = 0 THEN :one ELSE :other END, '00000000-0000-0000-0000-000000000001',"
                " i, now() + make_interval(secs => i / 3) FROM generate_series(0, :most) i"
            ),
            {"one": dualwrite_topic, "other": other, "most": rows - 1},
        )
    layout = mapped(order_by=["created_at"], timestamp_column="created_at")
    assert make(kafka, database, layout, most_rows=100).run(once=True).messages == rows
    for topic, first in ((dualwrite_topic, 0), (other, 1)):
        found = read_committed(kafka, topic)
        assert {record.key for record in found} == {b"00000000-0000-0000-0000-000000000001"}
        got = [int(record.value) for record in found]
        assert sorted(got) == list(range(first, rows, 2))
        assert [number // 3 for number in got] == sorted(number // 3 for number in got)
    dualwrite_kafka.delete_topic(other)


@on_postgresql
def test_a_round_takes_no_more_bytes_than_it_may(kafka, database, table, dualwrite_topic):
    with database.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_events (aggregatetype, aggregateid, type, payload)"
                " SELECT :t, i, 'made', to_jsonb(repeat('x', 100000)) FROM generate_series(1, 50) i"
            ),
            {"t": dualwrite_topic},
        )
    report = make(kafka, database, most_bytes=1_000_000).run(once=True)
    assert report.messages == 50
    assert report.rounds >= 5
    assert len(read_committed(kafka, dualwrite_topic)) == 50


@on_postgresql
def test_a_row_that_kafka_refuses_is_found_and_named(kafka, database, table, dualwrite_topic):
    for number in range(40):
        put(database, "no such topic!" if number == 23 else dualwrite_topic, "k", str(number))
    relay = make(kafka, database)
    with pytest.raises(TransactionAborted, match=r"seq 24: produce \(no such topic!\)") as caught:
        relay.run(once=True)
    assert not caught.value.retryable
    assert relay.report.failures == 1, "it was tried again, in vain"
    assert [int(record.value) for record in read_committed(kafka, dualwrite_topic)] == list(range(23))
    run(database, "DELETE FROM outbox_events WHERE seq = 24")
    assert make(kafka, database).run(once=True).messages == 16


@on_all
def test_refused_rows_are_moved_aside_and_the_rest_goes_on(
    kafka, database, table, dualwrite_topic, dualwrite, monkeypatch
):
    moves, move = [], Relay._move_aside
    monkeypatch.setattr(Relay, "_move_aside", lambda *given: moves.append(len(given[2])) or move(*given))
    for number in range(40):
        put(database, "no such topic!" if number in {0, 23, 39} else dualwrite_topic, f"k{number}", str(number))
    report = make(kafka, database, on_refused="aside").run(once=True)
    assert report.messages == 37
    assert moves == [3], "each row of a missing topic costs the time for which topics are waited for"
    assert [said.split(":")[0] for said in report.refused] == ["seq 1", "seq 24", "seq 40"]
    assert count(database) == 0
    assert len(read_committed(kafka, dualwrite_topic)) == 37

    writer = "relay-outbox_events-0"
    listed = dualwrite("outbox", "list", "--json")
    assert listed.exit_code == 4
    [shown] = json.loads(listed.stdout)["writers"]
    assert (shown["writer"], shown["rows"], shown["aside_count"]) == (writer, 0, 3)
    assert [(one["topic"], one["key"], one["bytes"]) for one in shown["aside"]] == [
        ("no such topic!", "k0", 1),
        ("no such topic!", "k23", 2),
        ("no such topic!", "k39", 2),
    ]
    first, second, third = (str(one["number"]) for one in shown["aside"])
    assert "no such topic!" in dualwrite("outbox", "list", writer).stdout
    whole = json.loads(dualwrite("outbox", "show", writer, second).stdout)
    assert (whole["value"], whole["headers"][0][0]) == ("23", "id")
    assert whole["reason"].startswith("outbox_events, seq 24: produce (no such topic!)")
    assert dualwrite("outbox", "show", writer, second, "--value").stdout_bytes == b"23"
    for unknown in (
        ("show", writer, "999999"),
        ("show", "nobody", first),
        ("list", "nobody"),
        ("drop", "nobody", first),
    ):
        told = dualwrite("outbox", *unknown)  # also what would ask, does not
        assert (told.exit_code, told.stdout, "`dualwrite outbox list`" in told.stderr) == (6, "", True)

    for wrong in ("0", str(2**63)):
        assert dualwrite("outbox", "replay", writer, wrong).exit_code == 2, "no number of a message"
    asked = dualwrite("outbox", "drop", writer, first)
    assert (asked.exit_code, "Aborted" in asked.stderr) == (1, True)
    assert dualwrite("outbox", "drop", writer, first, "--yes").stdout == f"{writer}: 1 message deleted\n"
    assert dualwrite("outbox", "drop", writer, first, "--yes").exit_code == 6
    assert dualwrite("outbox", "drop", writer).exit_code == 2
    assert dualwrite("outbox", "replay", writer, second).stdout == f"{writer}: 1 message waits again\n"
    [shown] = json.loads(dualwrite("outbox", "list", writer, "--json").stdout)["writers"]
    assert (shown["mode"], shown["rows"], shown["topics"]) == ("later", 1, {"no such topic!": 1})
    assert [str(one["number"]) for one in shown["aside"]] == [third]
    assert dualwrite("outbox", "drop", writer, "--all", "--yes").exit_code == 0
    assert dualwrite("outbox", "list").exit_code == 0


@on_postgresql
def test_what_is_put_back_is_sent_by_the_relay_that_runs(kafka, database, table, dualwrite_kafka, dualwrite):
    topic = f"late-{abs(hash(database.url))}"
    put(database, topic, "k", "1")
    relay = make(kafka, database, on_refused="aside")
    with running(relay):
        wait_until(lambda: relay.report.refused and relay.report.state == "waiting for rows")
        dualwrite_kafka.create_topic(topic)
        assert dualwrite("outbox", "replay", f"{relay.name}-0", "--all").exit_code == 0
        wait_until(lambda: [message.value for message in read_committed(kafka, topic)] == [b"1"])


@on_postgresql
def test_a_row_that_makes_no_message_is_moved_aside_as_it_is(kafka, database, table, dualwrite_topic):
    run(
        database,
        "ALTER TABLE outbox_events ADD COLUMN extra text",
        "ALTER TABLE outbox_events ALTER aggregatetype DROP NOT NULL",
    )
    for number, extra in enumerate([None, "{", "[1]", '"a"', '{"a": 1}']):
        put(database, dualwrite_topic if number else None, "k", str(number))
        run(database, f"UPDATE outbox_events SET extra = '{extra}' WHERE seq = {number + 1}" if extra else "SELECT 1")
    report = make(kafka, database, mapped(headers_column="extra"), on_refused="aside").run(once=True)
    assert report.messages == 1
    assert [said.split(": ", 1) for said in report.refused] == [
        ["seq 1", "aggregatetype, which names the topic, is null"],
        ["seq 2", "the column of headers does not hold JSON"],
        ["seq 3", "a header is neither a name with a value nor a pair"],
        ["seq 4", "the column of headers holds neither an object nor a list of pairs"],
    ]
    with database.connect() as connection:
        aside = connection.execute(text("SELECT key, value, topic FROM dualwrite_outbox_aside ORDER BY seq")).all()
    assert [tuple(bytes(one) if isinstance(one, memoryview) else one for one in row) for row in aside] == [
        (b"k", str(number).encode(), "") for number in range(4)
    ]


@on_postgresql
def test_what_stands_before_a_row_that_makes_no_message_is_sent_at_once(kafka, database, table, dualwrite_topic):
    run(database, "ALTER TABLE outbox_events ADD COLUMN extra text")
    for number in range(40):
        put(database, dualwrite_topic, "k", str(number))
    run(database, "UPDATE outbox_events SET extra = '{' WHERE seq = 24")
    with pytest.raises(TransactionAborted, match="seq 24: the column of headers does not hold JSON"):
        make(kafka, database, mapped(headers_column="extra")).run(once=True)
    assert [int(record.value) for record in read_committed(kafka, dualwrite_topic)] == list(range(23))


@on_postgresql
@pytest.mark.parametrize(
    ("columns", "changed", "said"),
    [
        (
            "id uuid PRIMARY KEY, payload text, aggregatetype text, aggregateid text",
            {},
            "give --order-by a column that grows",
        ),
        ("id bigint PRIMARY KEY, payload text, aggregateid text", {}, "has no column 'aggregatetype'; .*|no column"),
        ("id bigint PRIMARY KEY, payload text", {"topic": "t"}, "no column 'aggregateid'"),
        (
            "id bigint PRIMARY KEY, payload text, part text",
            {"topic": "t", "key_column": None, "partition_column": "part"},
            "which is no partition",
        ),
        (
            "id bigint PRIMARY KEY, payload text, made text",
            {"topic": "t", "key_column": None, "timestamp_column": "made"},
            "which is no time",
        ),
        (
            "id bigint PRIMARY KEY, payload text, sent text",
            {"topic": "t", "key_column": None, "mark": "sent"},
            "cannot mark",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(kafka, database, columns, changed, said):
    run(database, f"CREATE TABLE outbox_events ({columns})")
    with pytest.raises(ConfigurationError, match=said):
        make(kafka, database, OutboxTable(**changed)).run(once=True)


@on_postgresql
def test_a_missing_table_and_odd_settings_are_refused(kafka, database):
    with pytest.raises(ConfigurationError, match="there is no table 'nowhere'"):
        make(kafka, database, OutboxTable(name="nowhere")).run(once=True)
    with pytest.raises(ConfigurationError, match="not both"):
        OutboxTable(order_by=["a"], unordered=True)
    with pytest.raises(ConfigurationError, match="does not say where"):
        Placement.parse("a:nowhere")
    with pytest.raises(ConfigurationError, match="name one column"):
        OutboxTable(partition_column="a", placements=[Placement.parse("b:partition")])
    with pytest.raises(ConfigurationError, match="no tables in ZooKeeper"):
        Relay(OutboxTable(), kafka=kafka, database="zookeeper://localhost/x")


@on_all
def test_a_table_of_the_librarys_own_is_refused(kafka, database):
    """Its writers send from it, and know nothing of a relay."""
    with pytest.raises(ConfigurationError, match="'dualwrite_outbox' is a table of this library's own"):
        make(kafka, database, OutboxTable(name="dualwrite_outbox")).run(once=True)


@on_postgresql
def test_names_with_percent_signs_are_taken_as_they_are(kafka, database, url, dualwrite_topic):
    name, layout = '"10%"', mapped(name="10%", timestamp_column="a%b")
    run(
        database,
        f"DROP TABLE IF EXISTS {name}",
        f'CREATE TABLE {name} ({DEBEZIUM["postgresql"]}, "a%b" timestamptz)',
        f'INSERT INTO {name} (aggregatetype, aggregateid, type, payload, "a%b")'
        f" VALUES ('{dualwrite_topic}', 'k', 'made', '1', now())",
    )
    printed = CliRunner().invoke(commands, ["relay", "--print-trigger", "--table", "10%", "--url", url])
    driver = database.raw_connection()
    driver.driver_connection.execute(printed.stdout)
    driver.commit()
    driver.close()
    assert OutboxTableRows(database, layout).floor is not None
    assert make(kafka, database, layout, name="percent").run(once=True).messages == 1


@on_postgresql
def test_an_unordered_table_of_uuids_is_sent(kafka, database, dualwrite_topic):
    run(
        database,
        "CREATE TABLE outbox_events (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text,"
        " payload text)",
        f"INSERT INTO outbox_events (aggregatetype, aggregateid, payload) SELECT '{dualwrite_topic}', i, i"
        " FROM generate_series(1, 300) i",
    )
    assert make(kafka, database, mapped(order_by=[], unordered=True)).run(once=True).messages == 300
    assert sorted(int(record.value) for record in read_committed(kafka, dualwrite_topic)) == list(range(1, 301))


@on_postgresql
def test_a_partitioned_table_is_sent(kafka, database, dualwrite_topic):
    run(
        database,
        "CREATE TABLE outbox_events (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, aggregatetype text, aggregateid text,"
        " payload text) PARTITION BY RANGE (id)",
        "CREATE TABLE outbox_low PARTITION OF outbox_events FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE outbox_high PARTITION OF outbox_events FOR VALUES FROM (50) TO (1000)",
        f"INSERT INTO outbox_events (aggregatetype, aggregateid, payload) SELECT '{dualwrite_topic}', 'k', i"
        " FROM generate_series(1, 300) i",
    )
    assert make(kafka, database, mapped(order_by=[])).run(once=True).messages == 300
    assert [int(record.value) for record in read_committed(kafka, dualwrite_topic)] == list(range(1, 301))


class Taker:
    """Takes rows of the table as a relay does, without Kafka."""

    def __init__(self, engine, monkeypatch):
        monkeypatch.setattr(outbox, "_WORTH", 20)
        monkeypatch.setattr(outbox, "_AGAIN_S", 0.0)
        self.engine = engine.execution_options(isolation_level=ISOLATION["postgresql"])
        self.rows = OutboxTableRows(engine, OutboxTable(order_by=["seq"]))
        self.taken = []

    def take(self, limit=20):
        with self.engine.begin() as connection:
            found = self.rows.read(connection, limit, 1_000_000)
            if found.rows:
                self.rows.remove(connection, found.rows)
        self.rows.raise_floor()
        self.taken += [row[-1] for row in found.rows]
        return len(found.rows)


INSERT = "INSERT INTO outbox_events (aggregatetype, aggregateid, type) SELECT 't', 'k', 'x' FROM generate_series(1, {})"


@on_postgresql
@pytest.mark.parametrize("prepared", [False, True])
def test_a_read_begins_behind_what_is_gone_but_never_behind_a_row_that_may_still_appear(
    database, table, monkeypatch, prepared
):
    taker = Taker(database, monkeypatch)
    with database.connect() as late:
        late.execute(text(INSERT.format(1)))  # it has the lowest number
        run(database, INSERT.format(200))
        for _ in range(3):
            taker.take()
        if prepared:
            late.execute(text("PREPARE TRANSACTION 'late'"))
        for _ in range(3):
            taker.take()
        assert taker.rows.floor.number == 0
        assert min(taker.taken) == 2
        if prepared:
            with database.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
                other.execute(text("COMMIT PREPARED 'late'"))
        else:
            late.commit()
    while taker.take():
        assert taker.rows.floor.number <= max(taker.taken)
    assert sorted(taker.taken) == list(range(1, 202))
    assert taker.rows.floor.number > 100


@on_postgresql
def test_a_row_whose_number_was_given_by_hand_is_found_by_the_read_that_begins_at_the_head(
    database, table, monkeypatch
):
    taker = Taker(database, monkeypatch)
    run(database, INSERT.format(200))
    while taker.take():
        pass
    assert taker.rows.floor.number > 100
    by_hand = "(aggregatetype, aggregateid, type, seq) OVERRIDING SYSTEM VALUE VALUES ('t', 'k', 'x', 5)"
    run(database, f"INSERT INTO outbox_events {by_hand}")
    assert not taker.take()
    monkeypatch.setattr(taker.rows, "_whole_at", 0.0)
    assert taker.take() == 1
    assert taker.taken[-1] == 5


@on_postgresql
@pytest.mark.parametrize(
    ("column", "floor"),
    [
        ("bigint GENERATED ALWAYS AS IDENTITY UNIQUE", True),
        ("bigint GENERATED ALWAYS AS IDENTITY", False),
        ("bigint GENERATED BY DEFAULT AS IDENTITY UNIQUE", False),
        ("bigint GENERATED ALWAYS AS IDENTITY (CACHE 10) UNIQUE", False),
        ("bigint GENERATED ALWAYS AS IDENTITY (CYCLE) UNIQUE", False),
        ("bigserial UNIQUE", False),
        ("bigint UNIQUE NOT NULL", False),
    ],
)
def test_only_where_every_insert_draws_its_number_a_read_may_begin_behind_the_head(database, column, floor):
    run(
        database,
        DEBEZIUM["postgresql"]
        .join(["CREATE TABLE outbox_events (", ")"])
        .replace("bigint GENERATED ALWAYS AS IDENTITY UNIQUE", column),
    )
    assert (OutboxTableRows(database, OutboxTable(order_by=["seq"])).floor is not None) is floor


@on_postgresql
def test_a_trigger_tells_of_rows_long_before_the_poll(kafka, database, table, url, dualwrite_topic):
    printed = CliRunner().invoke(commands, ["relay", "--print-trigger", "--url", url])
    assert printed.exit_code == 0, printed.output
    driver = database.raw_connection()
    driver.driver_connection.execute(printed.stdout)
    driver.commit()
    driver.close()
    states = []
    relay = make(kafka, database, poll_interval_s=PATIENCE_S, progress=lambda report: states.append(report.state))
    with running(relay):
        wait_until(lambda: "waiting for rows" in states)
        # Twice: the first wait ends at once, as it begins to listen.
        for number in range(2):
            put(database, dualwrite_topic, "k", str(number))
            wait_until(lambda number=number: relay.report.messages == number + 1)
    assert len(read_committed(kafka, dualwrite_topic)) == 2


@on_postgresql
def test_others_stand_by_and_one_takes_over(kafka, database, table, dualwrite_topic):
    first, *others = (make(kafka, database) for _ in range(3))
    with running(first) as thread:
        wait_until(lambda: first.report.state == "waiting for rows")
        with running(others[0]), running(others[1]):
            wait_until(lambda: {one.report.state for one in others} == {"standing by"})
            found = make(kafka, database).run(once=True)
            assert found.other_active
            assert found.messages == 0
            put(database, dualwrite_topic, "k", "1")
            wait_until(lambda: first.report.messages == 1)
            first.stop()
            thread.join(PATIENCE_S)
            put(database, dualwrite_topic, "k", "2")
            wait_until(lambda: sum(one.report.messages for one in others) == 1)
            assert "standing by" in {one.report.state for one in others}
    assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"1", b"2"]
    assert [lease.owner for lease in read_leases(database)] == [None]


@on_postgresql
def test_a_sender_that_was_fenced_stands_by_again(kafka, database, table, dualwrite_topic, dualwrite):
    relay = make(kafka, database)
    with running(relay):
        wait_until(lambda: relay.report.state == "waiting for rows")
        dualwrite("recover", f"{relay.name}-0", "--open-for", "0")
        put(database, dualwrite_topic, "k", "1")
        wait_until(lambda: relay.report.messages == 1)
    assert len(read_committed(kafka, dualwrite_topic)) == 1


@on_postgresql
def test_it_goes_on_after_a_time_in_which_the_database_was_read_only(kafka, database, table, dualwrite_topic, url):
    """As a standby is, until a failover has promoted it."""
    name = database.url.database
    owner = create_engine(url, connect_args={"options": "-c default_transaction_read_only=off"})

    def set_to(value):
        with owner.begin() as connection:
            connection.exec_driver_sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = {value}')
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    relay = make(kafka, database)
    with running(relay):
        wait_until(lambda: relay.report.state == "waiting for rows")
        set_to("on")
        wait_until(lambda: "read-only" in (relay.report.error or ""))
        set_to("off")
        put(owner, dualwrite_topic, "k", "1")
        wait_until(lambda: relay.report.messages == 1)
    owner.dispose()


@pytest.fixture
def dualwrite(url, kafka):
    def run(*command):
        servers = ["--url", url]
        servers += [] if command[0] == "outbox" else ["--bootstrap-server", kafka["bootstrap.servers"]]
        return CliRunner().invoke(commands, [*command, *servers])

    return run


@on_postgresql
def test_the_command(dualwrite, database, table, dualwrite_topic):
    put(database, dualwrite_topic, "k", "1")
    options = ["--topic", "${routedByValue}", "--order-by", "seq", "--place", "type:header:eventType"]
    done = dualwrite("relay", "--once", "--json", *options)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"messages": 1, "rounds": 1, "refused": [], "losses": [], "other_active": False}
    assert dualwrite("relay", "--once", *options).stdout == "relay-outbox_events: 0 messages sent in 0 transactions\n"
    refused = dualwrite("relay", "--once")
    assert refused.exit_code == 1
    assert "give --order-by a column that grows" in refused.stderr
    wrong = dualwrite("relay", "--once", "--place", "type:body")
    assert wrong.exit_code == 1
    assert "does not say where" in wrong.stderr


def fill(url, topic, writer, until):
    """Another program: fills the table, in transactions of several rows, each key counted on its own."""
    engine = create_engine(url)
    number = 0
    while not until.is_set():
        with engine.begin() as connection:
            for _ in range(5):
                for key in range(3):
                    put_in(connection, topic, f"{writer}-{key}", str(number))
                number += 1
    engine.dispose()
    return number


def relaying(url, kafka, log):
    """A process that relays until it is killed, or told to end."""
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    servers = ["--url", url, "--bootstrap-server", kafka["bootstrap.servers"]]
    commands(
        [
            "relay",
            "--topic",
            "${routedByValue}",
            "--order-by",
            "seq",
            "--most-rows",
            "200",
            "--lease-timeout",
            "60",
            *servers,
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("url", ["postgresql", "mariadb"], indirect=True)
def test_each_row_is_sent_once_though_senders_are_killed_again_and_again(
    kafka, database, table, url, dualwrite_topic, tmp_path
):
    """A standby beside the killed one takes over at once: its lease would last for a minute."""
    log = tmp_path / "relay.log"

    def start():
        process = processes().Process(target=relaying, args=(url, kafka, log))
        process.start()
        return process

    until, written = threading.Event(), {}

    def write(name):
        written[name] = fill(url, dualwrite_topic, name, until)

    writers = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
    for one in writers:
        one.start()
    relays = [start(), start()]
    try:
        for _ in range(3):
            [owner] = owners(database)
            pid = int(owner.rpartition("/")[2])
            wait_until(lambda: is_moving(database), otherwise=log.read_text)
            victim = next(one for one in relays if one.pid == pid)
            victim.kill()
            victim.join()
            relays[relays.index(victim)] = start()
            wait_until(lambda owner=owner: owners(database) not in ([], [owner]), otherwise=log.read_text)
        until.set()
        for one in writers:
            one.join()
        wait_until(lambda: count(database) == 0, otherwise=log.read_text)
    finally:
        until.set()
        for one in relays:
            one.terminate()  # SIGTERM
        for one in relays:
            one.join(PATIENCE_S)
    assert [one.exitcode for one in relays] == [0, 0], log.read_text()
    sent = {}
    for record in read_committed(kafka, dualwrite_topic):
        sent.setdefault(record.key.decode(), []).append(int(record.value))
    assert sent == {f"{name}-{key}": list(range(written[name])) for name in written for key in range(3)}


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("away", [("suspend", "resume"), pytest.param(("kill", "start"), marks=pytest.mark.thorough)])
def test_each_row_is_sent_once_and_in_order_though_kafka_goes_away_and_comes_back(
    mortal_kafka, database, table, url, away
):
    """Rows come all the time, and nobody has to do anything."""
    gone, back = (getattr(mortal_kafka, name) for name in away)
    topic = mortal_kafka.create_topic(f"relay-{away[0]}", 2)
    until, written = threading.Event(), []
    writer = threading.Thread(target=lambda: written.append(fill(url, topic, "a", until)))
    relay = make(mortal_kafka.client_config(), database, poll_interval_s=0.1)
    with running(relay) as thread:

        def relays_until(condition):
            wait_until(lambda: condition() or not thread.is_alive())
            assert thread.is_alive(), "the relay has ended by itself"

        writer.start()
        try:
            relays_until(lambda: relay.report.messages > 0)
            gone()
            try:
                relays_until(lambda: relay.report.failures > 1)
                left = count(database)
                relays_until(lambda: count(database) > left)
            finally:
                back()
            relays_until(lambda: relay.report.failures == 0)
        finally:
            until.set()
            writer.join()
        relays_until(lambda: count(database) == 0)
    assert relay.report.refused == []
    sent = {}
    for record in read_committed(mortal_kafka.client_config(), topic):
        sent.setdefault(record.key.decode(), []).append(int(record.value))
    assert sent == {f"a-{key}": list(range(written[0])) for key in range(3)}


def owners(engine):
    found = []

    def look():
        found[:] = [lease.owner for lease in read_leases(engine) if lease.owner is not None]
        return found

    wait_until(look)
    return list(found)


def is_moving(engine):
    """Whether the head of the table has gone since the last look."""
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT min(seq) FROM outbox_events"))
    time.sleep(0.05)
    with engine.connect() as connection:
        now = connection.scalar(text("SELECT min(seq) FROM outbox_events"))
    return before is not None and now != before
