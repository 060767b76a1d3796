"""``KeyboardInterrupt`` at the lines of a dual write: both sides stay equal, and the writer goes on with its one lane."""

import itertools
import random

import pytest
from harness.interruption import Interruption
from sqlalchemy import insert, select

from dualwrite import DualWriteError, DualWriter, WriterLimits, recover
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing.checker import read_committed
from dualwrite.writing.lane_pool import Lanes

pytestmark = pytest.mark.parametrize("url", ["sqlite"], indirect=True)

STEP, RENEWAL_STEP = 61, 601
"""In the ordinary run each 61st line, beginning with a random one of the first; fewer of those that claim and settle."""
THOROUGH = [pytest.mark.thorough, pytest.mark.longest]


@pytest.mark.parametrize(
    ("renewed", "first", "step", "outbox"),
    [
        pytest.param(False, random.randrange(1, STEP + 1), STEP, None, id="some lines"),
        pytest.param(False, 1, 1, None, id="every line", marks=THOROUGH),
        pytest.param(True, random.randrange(1, RENEWAL_STEP + 1), RENEWAL_STEP, None, id="some lines of a renewal"),
        pytest.param(True, 1, 1, None, id="every line of a renewal", marks=THOROUGH),
        pytest.param(False, random.randrange(1, STEP + 1), STEP, "always", id="some lines of messages that wait"),
        pytest.param(False, 1, 1, "always", id="every line of messages that wait", marks=THOROUGH),
    ],
)
def test_an_interruption_at_any_line_keeps_no_lane_no_mark_and_no_claim(
    kafka, engine, orders, dualwrite_topic, renewed, first, step, outbox, monkeypatch
):
    """A renewed lane is claimed, settled and initialised inside the interrupted block, by the thread that is in it.

    A block whose messages wait turns the mode, or waits for the last send, which turns it back.
    """
    monkeypatch.setattr(Lanes, "_choose_due", lambda *_: None)
    numbers, told = itertools.count(), {}
    bodies = []

    def write(writer):
        number = next(numbers)
        with writer.transaction(outbox=outbox) as tx:
            bodies.append(number)
            tx.produce(dualwrite_topic, value=str(number), partition=0)
            tx.connection.execute(insert(orders).values(id=number))
        return number

    limits = WriterLimits(max_lanes=1, lane_timeout_s=30)
    setting = "never" if outbox is None else "fallback"
    with DualWriter("orders", kafka=kafka, database=engine, outbox=setting, limits=limits) as writer:
        write(writer)
        for line in itertools.count(first, step):
            interruption = Interruption(line)
            bodies.clear()
            if renewed:
                writer._lanes.first.producer._instance.doubt("for the test")
            try:
                with interruption.armed():
                    told[write(writer)] = interruption.at
            except KeyboardInterrupt:
                assert interruption.at is not None
            except DualWriteError as error:
                told[f"{interruption.at}"] = error
            if interruption.at is None or (renewed and bodies):
                break
            try:
                told[write(writer)] = None
            except DualWriteError as error:
                pytest.fail(f"after an interruption at {interruption.at}: {error!r}")
    recover("orders", kafka=kafka, database=engine)
    with engine.connect() as connection:
        rows = sorted(connection.execute(select(orders.c.id)).scalars())
    assert rows == sorted(int(message.value) for message in read_committed(kafka, dualwrite_topic))
    assert {number for number in told if isinstance(number, int)} <= set(rows)
    assert not [where for where in told.values() if where is not None], (
        "an interruption vanished, or became another error"
    )
    assert SqlStateStore(engine).incidents("orders") == []
