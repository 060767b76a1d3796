"""The spans of dual writes of every outcome, and the trace context in the headers of their messages; on the simulator."""

import threading

import pytest
from harness.engines import taking
from harness.recorded import Recorded
from harness.served import SETTINGS, TOPIC
from model.owners import make_producer
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from simulator.outside import SimulatedCoordinator
from sqlalchemy.orm import sessionmaker

from dualwrite import (
    CompletionPending,
    DecidedTransactionLost,
    Fenced,
    TransactionInDoubt,
    Unavailable,
    WriterLimits,
    failpoints,
    recover,
)
from dualwrite.clock import Deadline
from dualwrite.errors import OutcomeUnverifiable
from dualwrite.failpoints import FailpointError
from dualwrite.protocol.process import DoubtStep
from dualwrite.recovery import in_doubt
from dualwrite.recovery.claim import OwnerContext
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.telemetry import names
from dualwrite.writing.dual_write import DualWrite
from dualwrite.writing.lane import Lane


class Refused(Exception):
    """Raised by the code of a block."""


def produced(monkeypatch):
    """The headers of the messages that reach the engine."""
    found = []
    taking(monkeypatch, lambda message: found.append(list(message.headers)))
    return found


def test_a_dual_write_is_one_span_with_its_sends_the_decision_and_the_completion(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        recorded.clear()
        with (
            recorded.tracers.get_tracer("user").start_as_current_span("request") as request,
            writer.transaction() as tx,
        ):
            shop.put(tx, 1)
            shop.put(tx, 2)
        whole, send, commit, complete = (
            recorded.named(name)[0] for name in ("dual_write", f"send {TOPIC}", "COMMIT", "commit_transaction")
        )
        assert len(recorded.spans) == 4
    assert whole.parent.span_id == request.get_span_context().span_id
    assert {span.parent.span_id for span in (send, commit, complete)} == {whole.context.span_id}
    assert dict(whole.attributes) == {
        names.WRITER: "orders",
        names.TRANSACTIONAL_ID: tx.transactional_id,
        names.OUTCOME: "committed",
    }
    assert send.attributes[names.MESSAGE_COUNT] == 2
    assert send.attributes[names.DESTINATION] == TOPIC
    assert commit.attributes[names.DATABASE_SYSTEM] == "sqlite"
    assert whole.start_time <= send.start_time < send.end_time <= commit.start_time < commit.end_time
    assert commit.end_time <= complete.start_time < complete.end_time <= whole.end_time
    assert {span.status.is_ok for span in recorded.spans if span.name != "settle"} <= {True}


def test_a_block_without_messages_has_nothing_to_complete(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        recorded.clear()
        with writer.transaction() as tx:
            tx.connection.exec_driver_sql("INSERT INTO orders (id) VALUES (1)")
        assert [span.name for span in recorded.spans] == ["COMMIT", "dual_write"]


def abort(shop, writer, monkeypatch):
    with writer.transaction() as tx:
        shop.put(tx, 1)
        raise Refused


def be_fenced(shop, writer, monkeypatch):
    with shop.writer(), writer.transaction() as tx:
        shop.put(tx, 1)


def doubt(shop, writer, monkeypatch):
    real = SqlStateStore.commit

    def commit(self, connection, *, answer_s):
        real(self, connection, answer_s=answer_s)
        raise TransactionInDoubt("the answer is missing")

    monkeypatch.setattr(SqlStateStore, "commit", commit)
    monkeypatch.setattr(in_doubt, "resolve_commit", lambda *_: DoubtStep.IN_DOUBT)
    with writer.transaction() as tx:
        shop.put(tx, 1)


def not_answered(error):
    def complete(self, state, deadline, leaves):
        raise error

    def run(shop, writer, monkeypatch):
        monkeypatch.setattr(Lane, "complete", complete)
        with writer.transaction() as tx:
            shop.put(tx, 1)

    return run


def lose(shop, writer, monkeypatch):
    def lose_once_decided(point):
        if point == "write.decided":
            row = shop.state()
            shop.kafka.abort_by_timeout(f"orders.{row.namespace}.{row.incarnation}")

    with failpoints.watched(lose_once_decided), writer.transaction() as tx:
        shop.put(tx, 1)


def wait_in_vain(shop, writer, monkeypatch):
    ticket = writer._lanes.ticket()
    writer._lanes.take(ticket)
    try:
        with writer.transaction():
            raise AssertionError("the block is not entered")
    finally:
        ticket.end()


OUTCOMES = {
    "aborted": (abort, Refused, []),
    "fenced": (be_fenced, Fenced, []),
    "in doubt": (doubt, TransactionInDoubt, ["COMMIT"]),
    "completion pending": (not_answered(CompletionPending("x")), CompletionPending, ["commit_transaction"]),
    "lost": (lose, DecidedTransactionLost, ["commit_transaction"]),
    "unverifiable": (not_answered(OutcomeUnverifiable("x")), OutcomeUnverifiable, ["commit_transaction"]),
    "not begun": (wait_in_vain, Unavailable, []),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_is_named_and_its_error_is_on_the_step_that_failed(shop, recorded, monkeypatch, outcome):
    run, error, failed = OUTCOMES[outcome]
    told = []
    with shop.writer(
        telemetry=recorded.telemetry, limits=WriterLimits(max_lanes=1, lane_timeout_s=0.01), on_loss=told.append
    ) as writer:
        with pytest.raises(error):
            run(shop, writer, monkeypatch)
        [whole] = recorded.named("dual_write")
        assert whole.attributes[names.OUTCOME] == outcome
        assert whole.attributes[names.ERROR].endswith(error.__name__)
        assert not whole.status.is_ok
        assert whole.status.description is None  # drivers' errors show values
        steps = [span for span in recorded.spans if span.kind is trace.SpanKind.CLIENT]
        assert [span.name for span in steps if not span.status.is_ok] == failed
        assert {span.attributes.get(names.ERROR) for span in steps if not span.status.is_ok} <= {
            whole.attributes[names.ERROR]
        }
        assert recorded.values(names.WRITES) == {("orders", outcome): 1}
        assert recorded.metric(names.DURATION)["orders", outcome].count == 1
        losses = {kind: count for (kind,), count in recorded.values(names.LOSSES).items() if count}
        assert losses == ({outcome: 1} if outcome in {"lost", "unverifiable"} else {})
        monkeypatch.undo()
        shop.kafka.plant(monkeypatch)


def test_messages_of_an_aborted_block_end_their_span_with_its_error(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        with pytest.raises(Refused), writer.transaction() as tx:
            shop.put(tx, 1)
            raise Refused
        [send] = recorded.named(f"send {TOPIC}")
        assert send.attributes[names.ERROR].endswith("Refused")


def test_headers_carry_the_context_of_the_send_span(shop, recorded, monkeypatch):
    headers = produced(monkeypatch)
    with shop.writer(telemetry=recorded.telemetry) as writer, writer.transaction() as tx:
        tx.produce(TOPIC, "1", partition=0)
        tx.produce(TOPIC, "2", partition=0, headers={"kind": "order"})
        tx.produce(TOPIC, "3", partition=0, headers=[("kind", b"a"), ("kind", b"b")])
    [send] = recorded.named(f"send {TOPIC}")
    context = send.context
    traceparent = (
        "traceparent",
        b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags),
    )
    assert headers == [
        [traceparent],
        [("kind", b"order"), traceparent],
        [("kind", b"a"), ("kind", b"b"), traceparent],
    ]
    assert send.links == ()


def test_a_context_that_a_message_already_has_stays_and_is_linked(shop, recorded, monkeypatch):
    headers = produced(monkeypatch)
    own = {"TraceParent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with shop.writer(telemetry=recorded.telemetry) as writer, writer.transaction() as tx:
        tx.produce(TOPIC, "1", partition=0, headers=own)
    assert headers == [list(own.items())]
    [send] = recorded.named(f"send {TOPIC}")
    [link] = send.links
    assert link.context.span_id == 0xB7AD6B7169203331


@pytest.mark.parametrize("sampler", [None, ALWAYS_OFF], ids=["no SDK", "not sampled"])
def test_without_a_recording_span_headers_stay_as_they_are(shop, monkeypatch, sampler):
    headers = produced(monkeypatch)
    recorded = None if sampler is None else Recorded(sampler)
    with shop.writer(telemetry=recorded and recorded.telemetry) as writer, writer.transaction() as tx:
        tx.produce(TOPIC, "1", partition=0)
        tx.produce(TOPIC, "2", partition=0, headers={"kind": "order"})
    assert headers == [[], [("kind", b"order")]]
    assert shop.messages == ["1", "2"]


def test_messages_of_a_rolled_back_savepoint_are_not_counted(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer, writer.transaction() as tx:
        shop.put(tx, 1)
        with pytest.raises(Refused), tx.connection.begin_nested():
            shop.put(tx, 2)
            raise Refused
        with tx.connection.begin_nested():
            shop.put(tx, 3)
            shop.put(tx, 4)
    [send] = recorded.named(f"send {TOPIC}")
    assert send.attributes[names.MESSAGE_COUNT] == 3
    assert recorded.values(names.SENT) == {("kafka", TOPIC, "send"): 3}


def test_the_span_is_current_in_the_block_and_the_outer_one_after_it(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        before = contexts.get_current()
        with writer.transaction():
            assert trace.get_current_span().name == "dual_write"
        assert contexts.get_current() == before


def test_a_block_left_in_another_thread_leaves_that_threads_context_alone(shop, recorded, caplog):
    """Web frameworks do so; each thread works in a copy of the request's context."""
    own = trace.set_span_in_context(trace.INVALID_SPAN)
    after = []

    def leave():
        token = contexts.attach(own)
        block.__exit__(None, None, None)
        after.append(contexts.get_current())
        contexts.detach(token)

    with shop.writer(telemetry=recorded.telemetry) as writer:
        block = writer.transaction()
        entering = threading.Thread(target=block.__enter__)
        entering.start()
        entering.join()
        leaving = threading.Thread(target=leave)
        leaving.start()
        leaving.join()
    assert after == [own]
    assert "detach" not in caplog.text
    assert [span.attributes[names.OUTCOME] for span in recorded.named("dual_write")] == ["committed"]


def test_a_bound_session_has_the_same_spans_and_leaves_the_context_as_it_was(shop, recorded, monkeypatch):
    headers = produced(monkeypatch)
    factory = sessionmaker(shop.engine)
    with shop.writer(telemetry=recorded.telemetry) as writer:
        bound = writer.bind(factory)
        recorded.clear()
        with recorded.tracers.get_tracer("user").start_as_current_span("request") as request, factory() as session:
            bound.produce(session, TOPIC, "1", partition=0)
            session.commit()
            assert trace.get_current_span() is request
        assert trace.get_current_span() is trace.INVALID_SPAN
        [whole], [send] = recorded.named("dual_write"), recorded.named(f"send {TOPIC}")
    assert (whole.parent.span_id, whole.attributes[names.OUTCOME]) == (request.context.span_id, "committed")
    assert b"%016x" % send.context.span_id in headers[0][0][1]


def test_settling_and_a_recovery_have_spans_of_their_own(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry):
        [settle] = recorded.named("settle")
        assert (settle.attributes[names.SETTLED_IDS], settle.parent) == (3, None)
    leave_decided(shop)
    recorded.clear()
    report = recover("orders", kafka=SETTINGS, database=shop.engine, telemetry=recorded.telemetry)
    assert report.rolled_forward == ["orders"]
    settle, whole = recorded.spans
    assert (settle.name, whole.name) == ("settle", "recover")
    assert settle.parent.span_id == whole.context.span_id
    assert settle.attributes[names.ROLLED_FORWARD] == 1
    assert recorded.values(names.SETTLED)["rolled forward",] == 1


def leave_decided(shop):
    """A process ends right after its database has committed."""
    context = OwnerContext(SimulatedCoordinator(shop.kafka), shop.database.store(shop.engine), "dead owner")
    lane = Lane("orders", context, make_producer(shop.kafka, context, eager=False))
    lane.ready(Deadline(60))

    def die(point):
        if point == "write.decided":
            raise FailpointError(point)

    with (
        failpoints.watched(die),
        pytest.raises(FailpointError),
        shop.engine.connect() as connection,
        DualWrite(lane, context, connection, margin_s=10.0, timeout_s=60.0) as tx,
    ):
        shop.put(tx, 1)
