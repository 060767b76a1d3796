"""The decision's record and its COMMIT in one request, by psycopg's pipeline, against two requests.

The database's part of a dual write alone, without SQLAlchemy: BEGIN, the row's check, an INSERT, the record, COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks.delayed import Far
from benchmarks.servers import p50
from benchmarks.ways import in_turn

DELAYS_MS = (0.0, 0.5)
APART, TOGETHER = "the record, then COMMIT", "the record and COMMIT in one request"

_CHECK = "SELECT state, now() FROM bench_decision WHERE id = 1 AND incarnation = %s"
_INSERT = "INSERT INTO bench_pipelined (note) VALUES (%s)"
_RECORD = "UPDATE bench_decision SET state = %s WHERE id = 1 AND incarnation = %s RETURNING now()"
# Sent together, the statement itself must fail if it finds no row: COMMIT follows whatever it answers.
_RECORD_OR_FAIL = (
    f"WITH decided AS ({_RECORD}) SELECT CASE WHEN decided.now IS NULL THEN "
    "CAST('fenced' || coalesce(decided.now::text, '') AS integer) END FROM (VALUES (1)) one LEFT JOIN decided ON true"
)


def run(far: Far, *, operations: int, warm_up: int) -> dict[str, dict[str, float]]:
    """Measure; median milliseconds by way and delay."""
    with psycopg.connect(far.url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS bench_pipelined (note text)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS bench_decision (id int PRIMARY KEY, incarnation int, state text)"
        )
        connection.execute("INSERT INTO bench_decision VALUES (1, 1, '') ON CONFLICT DO NOTHING")
        connection.commit()
        ways = {APART: _apart(connection), TOGETHER: _together(connection)}
        found: dict[str, dict[str, float]] = {name: {} for name in ways}
        for delay_ms in DELAYS_MS:
            far.delay.value = delay_ms / 1000
            for name, samples in in_turn(ways, operations, warm_up=warm_up).items():
                found[name][str(delay_ms)] = p50(samples)
    return found


def _begin(connection: psycopg.Connection[Any], note: str) -> None:
    connection.execute(_CHECK, (1,)).fetchone()
    connection.execute(_INSERT, (note,))


def _apart(connection: psycopg.Connection[Any]) -> Callable[[str], None]:
    def write(note: str) -> None:
        _begin(connection, note)
        assert connection.execute(_RECORD, (note, 1)).fetchone() is not None
        connection.commit()

    return write


def _together(connection: psycopg.Connection[Any]) -> Callable[[str], None]:
    def write(note: str) -> None:
        _begin(connection, note)
        with connection.pipeline():
            connection.execute(_RECORD_OR_FAIL, (note, 1))
            connection.commit()

    return write
