"""The configurations of batches: the long runs, and those that every test run repeats."""

from __future__ import annotations

from typing import Final, NamedTuple

from dualwrite.protocol.prepared_state import Engine
from search.batches.world import BatchBounds, BatchBudgets


class BatchConfiguration(NamedTuple):
    """Bounds with a name.

    Attributes:
        sentence: What they are, for people.
        bounds: The bounds.
        quick: Seconds, and a part of every test run.
    """

    sentence: str
    bounds: BatchBounds
    quick: bool = False


_PREPARED: Final = BatchBounds(prepared=True)
_AT_ONCE: Final = BatchBounds(prepared=True, markers_late=False)

_OF_LIBRDKAFKA = {
    "batch": BatchConfiguration("the participants prepare, and the driver decides", BatchBounds(), quick=True),
    "batch_in_doubt": BatchConfiguration(
        "both have prepared; the answer to a COMMIT is lost",
        _PREPARED._replace(budgets=BatchBudgets(answer=1)),
        quick=True,
    ),
    "batch_and_a_lost_request": BatchConfiguration(
        "both have prepared; a request is late, or its answer lost",
        _PREPARED._replace(budgets=BatchBudgets(delay=1)),
        quick=True,
    ),
    "batch_and_an_ended_session": BatchConfiguration(
        "both have prepared; the database ends a session", _PREPARED._replace(budgets=BatchBudgets(session=1))
    ),
    "batch_timed_out": BatchConfiguration(
        "both have prepared; the broker times a participant out",
        _PREPARED._replace(budgets=BatchBudgets(timeout=1)),
        quick=True,
    ),
    "batch_in_doubt_and_a_lost_request": BatchConfiguration(
        "both have prepared; an answer of the database is lost, and one of Kafka's or a request",
        _AT_ONCE._replace(budgets=BatchBudgets(delay=1, answer=1)),
    ),
    "batch_and_another_task": BatchConfiguration(
        "both have prepared, and go on with their producers when they may; a request is late",
        _PREPARED._replace(goes_on=True, budgets=BatchBudgets(delay=1)),
    ),
    "batch_and_a_recovery": BatchConfiguration(
        "both have prepared; a recovery runs beside the driver", _AT_ONCE._replace(others=("recoverer",))
    ),
}

BATCHES: Final = _OF_LIBRDKAFKA | {
    f"native_{name}": BatchConfiguration(
        one.sentence, one.bounds._replace(engine=Engine.NATIVE), quick=name in {"batch", "batch_and_a_lost_request"}
    )
    for name, one in _OF_LIBRDKAFKA.items()
    if name not in {"batch_and_another_task", "batch_and_a_recovery"}
}
