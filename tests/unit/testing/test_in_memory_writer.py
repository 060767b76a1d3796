"""The writer in memory shows a user what the real one shows, and fails as it does; the real one runs on a simulated Kafka."""

import errno
import inspect
import re
import subprocess
import sys
import threading
import time

import pytest
from harness.databases import prepare, sqlite_url
from harness.engines import refusing
from harness.places import ROOT
from harness.served import TOPIC
from harness.user_view import WAYS, Base, View, rows_of
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import StaticPool

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    DualWriteError,
    DualWriter,
    Fenced,
    ProducerRecord,
    RowUnit,
    TransactionAborted,
    TransactionalProducer,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
)
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.recovery import in_doubt
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import InMemoryWriter, Place, TransactionState
from dualwrite.testing.memory.lane import EFFECTS, Rows
from dualwrite.writing.lane import Lane

every_failure = pytest.mark.parametrize(
    ("place", "error"), EFFECTS, ids=[f"{place.value}-{error.__name__}" for place, error in EFFECTS]
)


def engine_in_memory():
    engine = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def engine():
    engine = engine_in_memory()
    yield engine
    engine.dispose()


def in_bytes(value):
    return value.encode() if isinstance(value, str) else value


def as_user_sees(view, way):
    WAYS[way](view)
    view.show(rows_of(view.engine))


@pytest.mark.parametrize("way", WAYS)
def test_a_user_sees_the_same_of_both_writers(shop, tmp_path, way):
    real, in_memory = [], []
    with shop.writer(limits=WriterLimits(max_lanes=1)) as writer:
        as_user_sees(View(writer, shop.engine, TOPIC, real), way)
    (tmp_path / "other").mkdir()
    other = prepare("sqlite", sqlite_url(tmp_path / "other"))
    with InMemoryWriter("orders", database=other.engines[0], limits=WriterLimits(max_lanes=1)) as writer:
        as_user_sees(View(writer, other.engines[0], TOPIC, in_memory), way)
    assert in_memory == real
    assert [shown.value for shown in writer.messages] == [in_bytes(value) for value in shop.messages]
    other.dispose()


def write(writer, topic=TOPIC):
    """A dual write of one row and one message: its error."""
    try:
        with writer.transaction() as tx:
            tx.connection.execute(text("INSERT INTO orders (id) VALUES (1)"))
            tx.produce(topic, "1", partition=0)
    except DualWriteError as error:
        return error
    return None


def expected(effect, *, committed):
    rows = committed if effect.rows is Rows.EITHER else effect.rows is Rows.COMMITTED
    return effect.raised, effect.outcome, [1] if rows else [], [b"1"] if rows and effect.settled else []


def committed_or_not(effect):
    return (True, False) if effect.rows is Rows.EITHER else (None,)


@every_failure
def test_a_planted_failure_has_the_effect_of_the_table(place, error):
    effect = EFFECTS[place, error]
    for committed in committed_or_not(effect):
        engine = engine_in_memory()
        with InMemoryWriter(database=engine) as writer:
            writer.fail_next(place, error, rows_committed=committed)
            raised = write(writer)
            assert writer.messages == [], "visible before it is settled"
            writer.settle()
            messages = [message.value for message in writer.messages]
            found = type(raised), raised.outcome, list(rows_of(engine)), messages
            assert found == expected(effect, committed=committed)
            assert [message.value for message in writer.aborted] == (
                [] if place in {Place.BEGIN, Place.PRODUCE} or messages else [b"1"]
            )
            if error is not Fenced:
                with writer.transaction() as tx:
                    tx.produce(TOPIC, "next")
                assert writer.messages[-1].value == b"next"
        engine.dispose()


PORTS = {
    Place.BEGIN: (SqlStateStore, "read_incarnation"),
    Place.PREPARE: (TransactionalProducer, "prepare_transaction"),
    Place.DECIDE: (SqlStateStore, "decide"),
}


def plant_in_real(patch, shop, place, error, *, committed):
    """Let the real writer's own servers fail."""
    failure = error("planted")
    if place is Place.PRODUCE:
        refusing(patch, lambda *_: fail_with(failure))
    elif place in PORTS:
        patch.setattr(*PORTS[place], lambda *_, **__: fail_with(failure))
    elif place is Place.COMMIT:
        lose_the_commit(patch, failure, committed=committed)
    elif error is DecidedTransactionLost:
        real = TransactionalProducer.commit_transaction

        def time_out_first(self):
            shop.kafka.abort_by_timeout(self.transactional_id)
            real(self)

        patch.setattr(TransactionalProducer, "commit_transaction", time_out_first)
    else:

        def complete(lane, *_):
            if error is OutcomeUnverifiable:
                shop.kafka.abort_by_timeout(lane.producer.transactional_id)
            raise failure

        patch.setattr(Lane, "complete", complete)


def lose_the_commit(patch, failure, *, committed, unanswered=None):
    real = SqlStateStore.commit

    def commit(self, connection, **_):
        if committed:
            real(self, connection)
        else:
            self.rollback(connection)
        raise failure

    patch.setattr(SqlStateStore, "commit", commit)
    patch.setattr(in_doubt, "resolve_commit", lambda *_: fail_with(unanswered or Unavailable("nobody answers")))


def fail_with(error):
    raise error


@every_failure
def test_the_real_writer_has_the_effect_of_the_table(shop, place, error):
    effect = EFFECTS[place, error]
    for committed in committed_or_not(effect):
        losses = []
        with shop.writer(on_loss=losses.append) as writer, pytest.MonkeyPatch.context() as patch:
            plant_in_real(patch, shop, place, error, committed=committed)
            raised = write(writer)
        # Closing has settled.
        messages = [in_bytes(value) for value in shop.messages]
        found = type(raised), raised.outcome, list(rows_of(shop.engine)), messages
        assert found == expected(effect, committed=committed)
        if committed:
            shop.database.execute("DELETE FROM orders")
            shop.kafka.broker = type(shop.kafka)().broker


def test_a_doubt_whose_question_fails_by_itself_stays_a_doubt(shop):
    with shop.writer() as writer, pytest.MonkeyPatch.context() as patch:
        lost = TransactionInDoubt("the answer to COMMIT was lost")
        lose_the_commit(patch, lost, committed=True, unanswered=OSError(errno.EMFILE, "Too many open files"))
        assert isinstance(write(writer), TransactionInDoubt)
    assert list(rows_of(shop.engine))
    assert shop.messages


def test_a_failure_that_the_real_writer_cannot_have_is_refused():
    with InMemoryWriter() as writer:
        for place, error, committed in (
            ("begin", TransactionInDoubt, None),
            ("commit", CompletionPending, None),
            ("complete", TransactionAborted, None),
            ("commit", TransactionAborted, True),
            ("commits", TransactionAborted, None),
        ):
            with pytest.raises(ValueError, match=r"cannot fail with|are always|valid Place"):
                writer.fail_next(place, error, rows_committed=committed)


def test_a_planted_failure_that_no_block_reaches_fails_the_test():
    writer = InMemoryWriter()
    writer.open()
    writer.fail_next("complete", CompletionPending)
    with writer.transaction() as tx:
        tx.connection.exec_driver_sql("CREATE TABLE alone (id integer)")
    with pytest.raises(AssertionError, match="CompletionPending at 'complete'"):
        writer.close()
    writer.close()


def test_a_fenced_writer_stays_fenced():
    with InMemoryWriter() as writer:
        writer.fail_next("prepare", Fenced)
        for _ in range(2):
            with pytest.raises(Fenced), writer.transaction() as tx:
                tx.produce("orders", "1")
        assert writer.messages == []
        assert not writer.ready


def test_run_tries_again_only_where_nothing_was_written(engine):
    with InMemoryWriter(database=engine) as writer:
        writer.fail_next("commit", TransactionAborted, times=2)
        writer.fail_next("begin", Unavailable)
        writer.run(lambda tx: tx.produce("orders", "1"), longest_pause_s=0)
        assert [message.value for message in writer.messages] == [b"1"]
        writer.fail_next("commit", TransactionInDoubt, rows_committed=False)
        with pytest.raises(TransactionInDoubt):
            writer.run(lambda tx: tx.produce("orders", "2"), longest_pause_s=0)
        writer.fail_next("commit", TransactionAborted("a check failed", retryable=False))
        with pytest.raises(TransactionAborted, match="a check failed"):
            writer.run(lambda tx: tx.produce("orders", "3"), longest_pause_s=0)
        assert [message.value for message in writer.messages] == [b"1"]


def test_messages_are_kept_as_they_were_produced(engine):
    delivered = []
    with InMemoryWriter(database=engine) as writer:
        with writer.transaction() as tx:
            tx.produce(
                "orders",
                "1",
                b"k",
                partition=1,
                headers={"a": "b", "none": None},
                timestamp_ms=7,
                on_delivery=lambda error, message: delivered.append((error, message.topic(), message.value())),
            )
            tx.produce_many("mail", ["2", None], ["x", "y"])
            tx.send_offsets_to_transaction([("in", 0, 5)], "group")
        assert [tuple(message) for message in writer.messages_of("orders")] == [
            ("orders", b"1", b"k", (("a", b"b"), ("none", None)), 1, 7)
        ]
        assert [(message.key, message.value) for message in writer.messages_of("mail")] == [(b"x", b"2"), (b"y", None)]
        [recorded] = writer.transactions
        assert recorded.offsets == [([("in", 0, 5)], "group")]
        assert (recorded.rows_committed, recorded.state) == (True, TransactionState.COMMITTED)
        assert delivered == [(None, "orders", b"1")]


def test_columns_of_arrow_become_messages(engine):
    pa = pytest.importorskip("pyarrow")
    with InMemoryWriter(database=engine) as writer:
        with writer.transaction() as tx:
            tx.produce_arrow("orders", pa.array(["1", None]), pa.array([b"a", b"b"]), partitions=pa.array([0, None]))
        with pytest.raises(ValueError, match="rows of another column"), writer.transaction() as tx:
            tx.produce_arrow("orders", pa.array(["1"]), pa.array(["a", "b"]))
        assert [(m.value, m.key, m.partition) for m in writer.messages] == [(b"1", b"a", 0), (None, b"b", None)]


def test_a_connection_to_another_database_is_refused(engine):
    elsewhere = engine_in_memory()
    refused = pytest.raises(ConfigurationError, match="another database")
    with (
        InMemoryWriter(database=engine) as writer,
        elsewhere.connect() as other,
        refused,
        writer.transaction(other),
    ):
        raise AssertionError("the block is not entered")
    elsewhere.dispose()


def test_threads_take_turns_on_one_connection(engine):
    with InMemoryWriter(database=engine) as writer:

        def work(number):
            with writer.transaction() as tx:
                tx.connection.execute(text(f"INSERT INTO orders (id) VALUES ({number})"))
                tx.produce(TOPIC, str(number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(int(message.value) for message in writer.messages) == list(rows_of(engine)) == list(range(8))


def test_another_use_of_the_one_connection_inside_a_block_is_found_out(engine):
    with InMemoryWriter(database=engine) as writer:
        with pytest.raises(TransactionAborted, match="rolled back"), writer.transaction() as tx:
            tx.produce(TOPIC, "1")
            with engine.connect() as other:
                other.execute(text("SELECT 1"))
        assert writer.messages == []


OF_SERVERS = {"leased"}
"""What makes a writer of servers, and needs one that keeps its leases."""
OF_SETTINGS = {"kafka", "schema", "on_loss"}
"""Arguments that name servers, or answer for a process that has died."""


def test_it_has_every_method_of_the_real_writer_and_takes_what_that_takes():
    public = {name for name in dir(DualWriter) if not name.startswith("_")} - OF_SERVERS
    assert {name for name in public if not hasattr(InMemoryWriter, name)} == set()
    for name in public:
        real, ours = getattr(DualWriter, name), getattr(InMemoryWriter, name)
        assert isinstance(inspect.getattr_static(InMemoryWriter, name), property) == isinstance(
            inspect.getattr_static(DualWriter, name), property
        )
        if inspect.isfunction(real):
            assert inspect.signature(ours) == inspect.signature(real), name


def test_it_takes_every_setting_of_the_real_writer_but_those_of_servers():
    def arguments(kind):
        return set(inspect.signature(kind).parameters)

    assert arguments(DualWriter) - arguments(InMemoryWriter) == OF_SETTINGS
    assert arguments(InMemoryWriter) - arguments(DualWriter) == {"bulk", "max_message_bytes"}, "of the Kafka settings"


def test_it_loads_no_client_of_kafka_and_no_driver():
    code = """
from dualwrite.testing import InMemoryWriter
with InMemoryWriter() as writer:
    with writer.transaction() as tx, tx.connection.begin_nested():
        tx.produce("orders", "1")
import sys
print({"kafka", "confluent_kafka", "psycopg", "pyarrow", "sqlalchemy.orm"} & set(sys.modules), len(writer.messages))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "1"]


PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
SHOWN_ROWS = {Rows.ABSENT: "no", Rows.COMMITTED: "yes", Rows.EITHER: "as you say"}


@pytest.mark.parametrize("kind", ["InMemoryWriter", "AsyncInMemoryWriter"])
def test_the_code_of_the_page_runs(kind):
    [code] = [
        block
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        if f"import {kind}\n" in block
    ]
    names = {"__name__": "page"}
    exec(compile(code, "testing.md", "exec"), names)
    [test] = [names[name] for name in names if name.startswith("test_")]
    test()


def test_the_page_shows_every_failure_with_its_effect():
    shown = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| ([\w ]+) \| (settled|never)", PAGE, re.MULTILINE)
    assert shown == [
        (
            place.value,
            error.__name__,
            effect.raised.__name__,
            SHOWN_ROWS[effect.rows],
            "settled" if effect.settled else "never",
        )
        for (place, error), effect in EFFECTS.items()
    ]


def test_a_dual_write_takes_milliseconds(engine):
    took = []
    with InMemoryWriter(database=engine) as writer:
        for number in range(100):
            began = time.process_time()
            with writer.transaction() as tx:
                tx.connection.execute(text(f"INSERT INTO orders (id) VALUES ({number})"))
                tx.produce(TOPIC, str(number))
            took.append(time.process_time() - began)
    assert sorted(took)[50] < 0.01, "the page on testing says milliseconds"


def test_units_of_rows_are_whole_or_nowhere(engine):
    add = text("INSERT INTO orders (id) VALUES (:id)")
    with InMemoryWriter(database=engine) as writer:
        numbers = [1, 2, 1, 3]
        units = [RowUnit(add, {"id": number}, messages=[ProducerRecord("t", str(number))]) for number in numbers]
        errors = [future.exception(30) for future in [writer.submit(unit) for unit in units]]
        assert [type(error) for error in errors] == [type(None), type(None), IntegrityError, type(None)]
        assert [record.value for record in writer.messages_of("t")] == [b"1", b"2", b"3"]
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT id FROM orders ORDER BY id")).all() == [1, 2, 3]
