"""The search's demands on a state after settling: each fails on a state made by hand, and none on a good one."""

import pytest
from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.state import new_broker

from dualwrite.protocol.values import Outcome
from search.judge import Excuses, Judge
from search.rules import PRODUCT
from search.values import NOTHING, PLACES, Database, Decision

FIRST, SECOND = (1, 0), (1, 1)
BOTH = (0, 1)


def kafka_with(*transactions, last_is_open=False):
    """A broker with these committed transactions, each a label and the partitions that it is in."""
    broker = new_broker({PLACES[0][0]: len(PLACES)}, offsets_partitions=0)
    broker, mine = handle(broker, sim.InitProducerId("T.1"))
    sequences = [0, 0]
    for index, (label, numbers) in enumerate(transactions):
        places = tuple(PLACES[number] for number in numbers)
        broker, _ = handle(broker, sim.AddPartitionsToTxn("T.1", mine.producer_id, mine.producer_epoch, places))
        for number in numbers:
            message = sim.Produce(
                "T.1", mine.producer_id, mine.producer_epoch, PLACES[number], sequences[number], (label,)
            )
            broker, _ = handle(broker, message)
            sequences[number] += 1
        if not last_is_open or index < len(transactions) - 1:
            broker, _ = handle(broker, sim.EndTxn("T.1", mine.producer_id, mine.producer_epoch, committed=True))
            broker = environment.write_markers(broker)
    return broker


def judged(decided, broker, *, incident=None, **excused):
    database = Database(
        decided=tuple(Decision(label, NOTHING) for label in decided),
        incidents=((FIRST, incident),) if incident else (),
    )
    excuses = Excuses(**{"loses": False, "halves": False, "forgets": False, **excused})
    return Judge(PRODUCT)._look(database, broker, excuses)


LOST, UNVERIFIABLE = Outcome.LOST, Outcome.UNVERIFIABLE


@pytest.mark.parametrize(
    ("decided", "kafka", "told"),
    [
        ([], [(FIRST, BOTH)], "1.0 is not in the database, and Kafka shows all of it"),
        ([], [(FIRST, [0])], "1.0 is not in the database, and Kafka shows a part of it"),
        ([FIRST], [(FIRST, BOTH), (FIRST, [1])], "partition 1 shows a transaction twice"),
        ([FIRST, SECOND], [(SECOND, BOTH), (FIRST, BOTH)], "partition 0 shows another order than the database"),
        ([FIRST], [], "1.0 is in the database, Kafka shows nothing of it, and nobody was told"),
        ([FIRST], [(FIRST, [1])], "1.0 is in the database, Kafka shows a part of it, and nobody was told"),
        ([FIRST, SECOND], [(FIRST, BOTH), (SECOND, BOTH)], None),
        ([], [], None),
    ],
)
def test_both_sides_are_compared(decided, kafka, told):
    assert judged(decided, kafka_with(*kafka)) == told


@pytest.mark.parametrize(
    ("kafka", "incident", "excused", "told"),
    [
        ([], LOST, {}, "1.0 was decided, and the protocol itself has aborted it"),
        ([], LOST, {"loses": True}, None),
        ([(FIRST, BOTH)], LOST, {"loses": True}, "1.0 is recorded as lost, and whole on both sides"),
        ([(FIRST, [0])], LOST, {"loses": True}, "1.0 is recorded as lost, and Kafka shows a part of it"),
        ([(FIRST, [0])], LOST, {"loses": True, "halves": True}, None),
        ([], UNVERIFIABLE, {}, "1.0 is recorded as unverifiable, and its records were there all the time"),
        ([], UNVERIFIABLE, {"forgets": True}, None),
        ([(FIRST, BOTH)], UNVERIFIABLE, {"forgets": True}, None),
        (
            [(FIRST, [0])],
            UNVERIFIABLE,
            {"forgets": True},
            "1.0 is recorded as unverifiable, and Kafka shows a part of it",
        ),
    ],
)
def test_a_recorded_loss_needs_an_excuse_and_must_be_true(kafka, incident, excused, told):
    assert judged([FIRST], kafka_with(*kafka), incident=incident, **excused) == told


def test_what_stays_open_is_seen():
    broker = kafka_with((FIRST, BOTH), (SECOND, [1]), last_is_open=True)
    assert judged([FIRST], broker) == "a transaction stays open in partition 1: readers wait"
