"""Opening in the background: what a block, a unit and the health of a writer show until a server answers, and after it."""

import logging
import threading

import pytest
from harness.databases import Thread
from harness.patience import wait_until
from harness.served import TOPIC

from dualwrite import WriterLimits
from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    Unavailable,
)
from dualwrite.protocol.findings import standby
from dualwrite.protocol.process import OpeningStep, after_failed_opening
from dualwrite.writing import opening as module
from dualwrite.writing.opening import Opening

LOST = DecidedTransactionLost("lost", transactional_id="orders", state="1:1")


class Attempts:
    """Ends each attempt as the test says, one after the other; waits for the next word."""

    def __init__(self):
        self.ends = []
        self.came = threading.Semaphore(0)
        self.made = 0
        self.published, self.discarded, self.reported = [], [], []
        self.opening = Opening(
            "orders",
            self._attempt,
            publish=self.published.append,
            discard=self.discarded.append,
            report=self.reported.append,
        )

    def end(self, how):
        self.ends.append(how)
        self.came.release()

    def _attempt(self):
        self.came.acquire()
        how = self.ends.pop(0)
        self.made += 1
        if isinstance(how, BaseException):
            raise how
        return how


@pytest.fixture
def attempts(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_JOIN_S", 0.1)
    found = Attempts()
    found.opening.start()
    yield found
    found.opening.stop()
    found.end("too late")


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (Unavailable("away"), OpeningStep.AGAIN),
        (RuntimeError("unknown"), OpeningStep.AGAIN),
        (LOST, OpeningStep.REPORT),
        (OutcomeUnverifiable("gone"), OpeningStep.REPORT),
        (DatabaseWentBack("back", state="1:1"), OpeningStep.REPORT),
        (DatabaseWentBack("back"), OpeningStep.KEEP),
        (ConfigurationError("wrong"), OpeningStep.KEEP),
        (standby(is_standby=True).as_error(), OpeningStep.AGAIN),
        (Fenced("taken"), OpeningStep.KEEP),
    ],
)
def test_only_what_waiting_can_mend_is_tried_again(error, step):
    assert after_failed_opening(error) is step


def test_a_block_waits_while_nothing_is_known_to_be_missing_and_goes_on_once_it_is_open(attempts):
    block = Thread(lambda: attempts.opening.wait(60))
    attempts.end("opened")
    block.result()
    assert attempts.published == ["opened"]
    assert attempts.opening.waits_for is None


def test_a_block_is_refused_at_once_as_soon_as_a_server_is_missing_with_its_name_and_since_when(attempts):
    block = Thread(lambda: attempts.opening.wait(60))
    attempts.end(Unavailable("Kafka at kafka:9092 does not answer"))
    for _ in range(2):
        with pytest.raises(
            Unavailable, match=r"not open yet: Kafka at kafka:9092 does not answer, since \d\d:\d\d:\d\d UTC"
        ):
            block.result()
        block = Thread(lambda: attempts.opening.wait(60))
    attempts.end("opened")
    wait_until(lambda: attempts.opening.done)
    attempts.opening.check()


def test_an_error_that_waiting_cannot_mend_is_kept_and_logged_once(attempts, caplog):
    attempts.end(ConfigurationError("the tables are missing", transactional_id="orders"))
    errors = []
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="tables are missing") as raised:
            attempts.opening.wait(60)
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert attempts.opening.waits_for is None
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    attempts.opening.stop()
    assert attempts.made == 1


def test_a_loss_is_reported_and_raised_by_no_block_and_the_next_attempt_opens(attempts):
    block = Thread(lambda: attempts.opening.wait(60))
    attempts.end(LOST)
    attempts.end("opened")
    block.result()
    assert attempts.reported == [LOST]


def test_what_is_missing_is_logged_once_and_so_is_the_end_of_it(attempts, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(3):
        attempts.end(Unavailable("away"))
    attempts.end("opened")
    wait_until(lambda: len(caplog.records) >= 2)
    assert ["not open yet" in caplog.text, "open after" in caplog.text] == [True, True]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def test_a_writer_that_was_closed_meanwhile_does_not_open(attempts):
    attempts.opening.stop()
    attempts.end("too late")
    wait_until(lambda: attempts.discarded == ["too late"])
    assert attempts.published == []


# A whole writer, on a simulated Kafka that is away when it starts


@pytest.fixture
def away(shop):
    shop.kafka.away = True
    return shop


def test_a_writer_starts_at_once_while_kafka_is_away_and_serves_blocks_once_it_is_back(away):
    writer = away.writer()
    writer.open(wait=False)
    try:
        with (
            pytest.raises(Unavailable, match="not open yet: Kafka at simulated:9092 does not answer"),
            writer.transaction(),
        ):
            raise AssertionError("the block is not entered")
        with pytest.raises(Unavailable, match="simulated:9092"):
            writer.submit(away.put)
        health = writer.health()
        assert (health.open, health.ready) == (False, False)
        assert "Kafka at simulated:9092" in health.problems[0]
        assert "opening" in repr(writer)
        away.kafka.away = False
        wait_until(lambda: writer.ready)
        with writer.transaction() as tx:
            away.put(tx, 1)
        assert away.both_have(1)
        assert writer.health().problems == ()
    finally:
        writer.close()
    with pytest.raises(IllegalStateError), writer.transaction():
        raise AssertionError("the block is not entered")


def test_a_block_that_comes_while_the_servers_answer_waits_for_the_opening(shop):
    writer = shop.writer()
    writer.open(wait=False)
    try:
        with writer.transaction() as tx:
            shop.put(tx, 1)
    finally:
        writer.close()
    assert shop.both_have(1)


def test_a_unit_that_comes_while_the_servers_answer_waits_for_the_opening(shop):
    writer = shop.writer()
    writer.open(wait=False)
    try:
        writer.submit(lambda tx: shop.put(tx, 1)).result(60)
    finally:
        writer.close()
    assert shop.both_have(1)


def test_a_writer_opens_once_in_whichever_way(shop):
    writer = shop.writer()
    writer.open(wait=False)
    try:
        for wait in (True, False):
            with pytest.raises(IllegalStateError, match="already opened"):
                writer.open(wait=wait)
    finally:
        writer.close()


def test_closing_ends_an_opening_that_waits_for_kafka(away):
    writer = away.writer()
    writer.open(wait=False)
    with pytest.raises(Unavailable), writer.transaction():
        raise AssertionError("the block is not entered")
    writer.close()
    assert not any(thread.name == "dualwrite orders opens" for thread in threading.enumerate())
    assert not writer.health().open


def test_tables_that_are_missing_are_named_by_each_block_and_by_health(shop):
    shop.database.execute("DROP TABLE dualwrite_version")
    writer = shop.writer()
    writer.open(wait=False)
    try:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="dualwrite migrate"), writer.transaction():
                raise AssertionError("the block is not entered")
        assert any("dualwrite migrate" in problem for problem in writer.health().problems)
    finally:
        writer.close()


def test_a_member_of_a_fleet_leases_an_id_once_kafka_is_back(away):
    writer = type(away.writer()).leased("fleet", kafka={"bootstrap.servers": "simulated:9092"}, database=away.engine)
    writer.open(wait=False)
    try:
        with pytest.raises(Unavailable, match="Kafka at simulated:9092"), writer.transaction():
            raise AssertionError("the block is not entered")
        assert away.database.query("SELECT * FROM dualwrite_lease WHERE owner IS NOT NULL") == []
        assert "Kafka at simulated:9092" in writer.health().problems[0]
        away.kafka.away = False
        wait_until(lambda: writer.ready)
        assert writer.transactional_id == "fleet-0"
        with writer.transaction() as tx:
            away.put(tx, 1)
    finally:
        writer.close()
    assert away.both_have(1)


# A writer whose messages may wait: it opens without Kafka


@pytest.fixture
def falls_back(away):
    return away.writer(outbox="fallback", limits=WriterLimits(max_lanes=4, fallback_after_s=0.05))


def test_a_writer_whose_messages_may_wait_opens_without_kafka(away, falls_back):
    with falls_back as writer:
        lanes = [pooled.lane for pooled in writer._lanes.all]
        assert [lane.may_wait for lane in lanes] == [True] * len(lanes)
        assert not any(lane.usable for lane in lanes)
        wait_until(lambda: writer._monitor.silence is not None)
        assert "to open the writer" in str(writer._monitor.silence)
        assert writer._connected.outbox_lane.transactional_id == "orders#outbox"
        assert away.state().cluster_id == "unverified from 1"
        away.kafka.away = False
        with writer.transaction() as tx:
            away.put(tx, 1)
        wait_until(lambda: away.kafka.visible_so_far() == ["1"] == away.rows)  # its message may still be on its way
        wait_until(lambda: away.state().cluster_id == away.kafka.broker.cluster_id)


def test_blocks_use_the_lanes_whose_claim_stands_before_any_is_added(away, falls_back):
    with falls_back as writer:
        wait_until(lambda: writer._monitor.silence is not None)
        claimed = {pooled.lane for pooled in writer._lanes.all}
        tickets = [writer._lanes.ticket() for _ in range(len(claimed) + 1)]
        used = [writer._lanes.take(ticket) for ticket in tickets[:-1]]
        assert set(used) == {pooled.lane for pooled in writer._lanes.all} == claimed
        added = writer._lanes.take(tickets[-1])
        assert added not in claimed
        added.ready_to_wait(Deadline(60))
        assert added.may_wait
        for ticket in tickets:
            ticket.end()


def test_what_every_former_lane_and_send_has_left_is_settled_once_kafka_is_back(away, falls_back):
    """A send may have been the last one: decided, with the mode turned back, so nothing waits that would make it go on."""
    away.kafka.away = False
    store = away.database.store(away.engine)
    with away.writer(limits=WriterLimits(max_lanes=1)):
        pass
    names = [*(f"orders#{number}" for number in range(1, 9)), "orders#outbox"]
    store.claim(names, owner="former", cluster_id=away.kafka.broker.cluster_id)
    away.kafka.away = True
    with falls_back as writer:
        assert [pooled.lane.transactional_id for pooled in writer._lanes.all] == ["orders", *names[:6]]
        assert all(row.incarnation > 1 for row in store.read(names))
        away.kafka.away = False
        wait_until(lambda: all(row.settled_incarnation == row.incarnation - 1 for row in store.read(names)))


def test_of_two_that_open_without_kafka_the_first_is_fenced(away, falls_back):
    second = away.writer(outbox="fallback", limits=WriterLimits(fallback_after_s=0.05))
    with falls_back as first, second:
        away.kafka.away = False
        with pytest.raises(Fenced), first.transaction() as tx:
            tx.produce(TOPIC, "1", partition=0)
        wait_until(lambda: second.ready)
        with second.transaction() as tx:
            away.put(tx, 2)
        assert away.both_have(2)
