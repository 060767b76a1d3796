"""The metrics of dual writes, and those that are read from open writers."""

import itertools
import os
import threading

import pytest
from harness.patience import wait_until

from dualwrite import WriterLimits, failpoints
from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
from dualwrite.protocol.lives import Phase
from dualwrite.telemetry import names
from dualwrite.telemetry.observer import Instruments
from dualwrite.types import Health


def die_once_decided(point):
    if point == "write.decided":
        raise failpoints.FailpointError(point)


def counts(recorded, metric):
    return {key: point.count for key, point in recorded.metric(metric).items()}


def test_a_committed_dual_write_spends_time_in_every_phase_and_one_that_aborts_in_those_it_reached(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        with writer.transaction() as tx:
            shop.put(tx, 1)
        committed = {(("orders", phase.value)): 1 for phase in Phase if phase is not Phase.ABORT}
        assert counts(recorded, names.PHASE_DURATION) == committed
        with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
            shop.put(tx, 2)
            raise ZeroDivisionError
        found = counts(recorded, names.PHASE_DURATION)
    again = {phase for (_, phase), count in found.items() if count == 2}
    assert again == {"lane", "begin", "body"}
    assert found["orders", "abort"] == 1
    assert recorded.values(names.WRITES) == {("orders", "committed"): 1, ("orders", "aborted"): 1}


def test_the_phases_add_up_to_the_whole(shop, recorded, monkeypatch):
    with shop.writer(telemetry=recorded.telemetry) as writer:
        ticks = itertools.count()
        monkeypatch.setattr(
            "dualwrite.telemetry.observer.now_s", lambda: float(next(ticks))
        )  # no busy machine between them
        for number in range(5):
            with writer.transaction() as tx:
                shop.put(tx, number)
    whole = recorded.metric(names.DURATION)["orders", "committed"].sum
    left_out = whole - sum(point.sum for point in recorded.metric(names.PHASE_DURATION).values())
    assert left_out == 5 * 3  # from the decision to Kafka's commit, and from that to the end, which two reads note


def test_open_writers_are_read_and_closed_ones_are_not(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry, limits=WriterLimits(max_lanes=3)) as writer:
        assert recorded.values(names.READY) == {("orders",): 1}
        assert recorded.values(names.LANES_MAX) == {("orders",): 3}
        with writer.transaction() as tx:
            shop.put(tx, 1)
            assert recorded.values(names.LANES) == {
                ("orders", "used"): 1,
                ("orders", "idle"): 2,
                ("orders", "unsettled"): 0,
            }
            assert recorded.values(names.OPEN_TIME)["orders",] > 0
            assert 0 < recorded.values(names.TIME_LEFT)["orders",] < 15 * 60
        assert recorded.values(names.LANES)["orders", "used"] == 0
        assert recorded.values(names.OPEN_TIME) == {("orders",): 0}
        assert recorded.values(names.TIME_LEFT) == {}
    assert recorded.values(names.READY) == {}


def test_the_oldest_transaction_in_kafka_is_shown_as_it_was_when_the_brokers_were_asked_last(
    shop, recorded, monkeypatch
):
    monkeypatch.setattr("dualwrite.writing.health.EVERY_S", 0.0)
    with shop.writer(telemetry=recorded.telemetry) as writer:
        assert recorded.values(names.KAFKA_OPEN_TIME) == {}  # the first look has them asked
        wait_until(lambda: recorded.values(names.KAFKA_OPEN_TIME) == {("orders",): 0})
        monkeypatch.setattr(writer._opened().context.coordinator, "longest_open_s", lambda _: 95.0)
        wait_until(lambda: recorded.values(names.KAFKA_OPEN_TIME) == {("orders",): 95})
    assert recorded.values(names.KAFKA_OPEN_TIME) == {}


def test_blocks_that_wait_for_a_lane_are_counted(shop, recorded):
    with shop.writer(telemetry=recorded.telemetry, limits=WriterLimits(max_lanes=1)) as writer:
        begun, leave = threading.Event(), threading.Event()

        def wait():
            begun.set()
            with writer.transaction():
                pass

        with writer.transaction():
            waiting = threading.Thread(target=wait)
            waiting.start()
            begun.wait()
            while recorded.values(names.WAITING) != {("orders",): 1}:
                leave.wait(0.001)
        waiting.join()
        while recorded.values(names.WAITING) != {("orders",): 0}:  # the writer's own threads take lanes, too
            leave.wait(0.001)


def test_a_lane_that_may_have_left_something_open_is_shown_with_its_age(shop, recorded, monkeypatch):
    from dualwrite import Unavailable
    from dualwrite.writing.lane import Lane

    def refuse(self, deadline):
        self.discard()
        tried.set()
        raise Unavailable("not yet")

    tried = threading.Event()
    with shop.writer(telemetry=recorded.telemetry, limits=WriterLimits(max_lanes=1)) as writer:
        with monkeypatch.context() as patched:
            patched.setattr(Lane, "settle", refuse)
            with (
                failpoints.watched(die_once_decided),
                pytest.raises(failpoints.FailpointError),
                writer.transaction() as tx,
            ):
                shop.put(tx, 1)
            tried.wait()
            while not writer.health().stuck:
                tried.wait(0.001)
            assert recorded.values(names.LANES)["orders", "unsettled"] == 1
            assert recorded.values(names.UNSETTLED_TIME)["orders",] > 0
            assert not writer.ready
        with writer.transaction():
            pass
        assert writer.ready
        assert recorded.values(names.UNSETTLED_TIME)["orders",] == 0


def test_what_is_counted_for_an_alert_begins_at_zero(shop, recorded):
    """Prometheus sees no increase where a counter appears with its first value."""
    with shop.writer(telemetry=recorded.telemetry):
        assert recorded.values(names.LOSSES) == {("lost",): 0, ("unverifiable",): 0, ("went back",): 0}
        assert recorded.values(names.OUTBOX_ASIDE) == {("orders",): 0}


def test_losses_are_counted_by_kind(recorded):
    for loss in (
        DecidedTransactionLost("x"),
        OutcomeUnverifiable("x"),
        OutcomeUnverifiable("x"),
        DatabaseWentBack("x"),
    ):
        recorded.telemetry.lost(loss)
    assert recorded.values(names.LOSSES) == {("lost",): 1, ("unverifiable",): 2, ("went back",): 1}


def test_a_process_with_a_writer_for_every_tenant_has_a_bounded_number_of_series(recorded):
    for number in range(150):
        recorded.telemetry.instruments.phase(f"tenant-{number}", Phase.BODY, 0.1)
        recorded.telemetry.opened(lambda number=number: Health(f"tenant-{number}", open=True), lambda: 1.0)
    found = counts(recorded, names.PHASE_DURATION)
    assert len(found) == 101
    assert found["other", "body"] == 50
    assert len(recorded.values(names.READY)) == 100


def test_a_forked_process_does_not_report_its_parents_writers(recorded, monkeypatch):
    recorded.telemetry.opened(lambda: Health("orders", open=True), lambda: 1.0)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert recorded.values(names.READY) == {}


def test_every_declared_metric_is_made_and_no_other():
    made = []

    class Meter:
        def __getattr__(self, name):
            return lambda metric, *_, **__: made.append((name, metric))

    Instruments(Meter())
    kinds = {
        "create_counter": names.Instrument.COUNTER,
        "create_histogram": names.Instrument.HISTOGRAM,
        "create_observable_gauge": names.Instrument.GAUGE,
        "create_observable_up_down_counter": names.Instrument.UP_DOWN_COUNTER,
    }
    assert sorted((name, kinds[kind].value) for kind, name in made) == sorted(
        (metric.name, metric.instrument.value) for metric in names.METRICS
    )
