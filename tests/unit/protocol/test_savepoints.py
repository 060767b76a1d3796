"""Savepoints read from statements, and the messages that belong to them: as SQLite itself has it with rows."""

from __future__ import annotations

import itertools
import sqlite3

import pytest

from dualwrite.protocol.message import Move, NotUnderstood, Savepoints, moves_of

OPEN, RELEASE, BACK = Move.OPEN, Move.RELEASE, Move.ROLL_BACK


@pytest.mark.parametrize(
    ("statement", "moves"),
    [
        ("SAVEPOINT sa_savepoint_1", [(OPEN, "sa_savepoint_1")]),
        ("RELEASE SAVEPOINT sa_savepoint_1", [(RELEASE, "sa_savepoint_1")]),
        ("ROLLBACK TO SAVEPOINT sa_savepoint_1", [(BACK, "sa_savepoint_1")]),
        ("\n release\tx ;", [(RELEASE, "x")]),
        ("rollback transaction to X", [(BACK, "x")]),
        ("ROLLBACK WORK TO SAVEPOINT savepoint", [(BACK, "savepoint")]),
        ("RELEASE savepoint", [(RELEASE, "savepoint")]),
        ("-- a remark\nSAVEPOINT a", [(OPEN, "a")]),
        ("/* savepoint b; /* nested */ */ SAVEPOINT a", [(OPEN, "a")]),
        ('SAVEPOINT "My ""own"""', [(OPEN, 'My "own"')]),
        ("SAVEPOINT $a", None),
        ("SAVEPOINT a; INSERT INTO t VALUES ('; RELEASE a'); ROLLBACK TO a", [(OPEN, "a"), (BACK, "a")]),
        ("SELECT E'it\\'s; RELEASE a'; SAVEPOINT b", [(OPEN, "b")]),
        ("SELECT 'it\\'; SAVEPOINT b", None),  # where the text ends is a setting of the server's
        ("DO $$ BEGIN PERFORM 1; SAVEPOINT a; END $$", []),
        ("DO $x$ ... $$; SAVEPOINT a; $$ $x$; SAVEPOINT b", [(OPEN, "b")]),
        ("SELECT $1; SAVEPOINT ä", [(OPEN, "ä")]),
        ("SAVEPOINT Ä", [(OPEN, "Ä")]),  # databases lower the letters of ASCII
        ("ROLLBACK", []),
        ("ROLLBACK AND CHAIN", []),
        ("SELECT release FROM savepoint", []),
        ("INSERT INTO t VALUES ('a;b')", []),
        ('SAVEPOINT U&"a"', None),
        ("SAVEPOINT", None),
        ("SAVEPOINT a b", None),
        (f"SAVEPOINT {'x' * 64}", None),
    ],
)
def test_savepoints_are_read_from_statements(statement: str, moves: list[tuple[Move, str]] | None) -> None:
    if moves is None:
        with pytest.raises(NotUnderstood):
            moves_of(statement)
    else:
        assert list(moves_of(statement)) == moves


def test_names_in_quotes_keep_their_case_only_where_the_database_does_it() -> None:
    assert list(moves_of('SAVEPOINT "X"')) == [(OPEN, "X")]
    assert list(moves_of('SAVEPOINT "X"', quotes_keep_case=False)) == [(OPEN, "x")]
    assert list(moves_of("SAVEPOINT [X]; RELEASE `X`; ROLLBACK TO 'X'", quotes_keep_case=False)) == [
        (OPEN, "x"),
        (RELEASE, "x"),
        (BACK, "x"),
    ]


STEPS = ["message", *itertools.product((OPEN, RELEASE, BACK), "ab")]


@pytest.mark.parametrize("length", [4, pytest.param(6, marks=pytest.mark.thorough)])
def test_messages_go_with_savepoints_as_rows_do_in_every_sequence(sqlite: sqlite3.Connection, length: int) -> None:
    sqlite.execute("CREATE TABLE row (number INTEGER)")
    for steps in itertools.product(STEPS, repeat=length):
        savepoints: Savepoints[int] = Savepoints()
        sent: list[int] = []
        sqlite.execute("BEGIN")
        for number, step in enumerate(steps):
            if step == "message":
                savepoints.add(number)
                sqlite.execute("INSERT INTO row VALUES (?)", (number,))
            else:
                move, name = step
                try:
                    sqlite.execute(f"{move.value} {name}")
                except sqlite3.OperationalError:  # no such savepoint
                    with pytest.raises(NotUnderstood):
                        savepoints.apply(move, name)
                else:
                    savepoints.apply(move, name)
            sent += savepoints.take()
            if sent and savepoints.idle:
                assert sent == sorted(sent)
        savepoints.end()
        sent += savepoints.take()
        assert sent == [number for (number,) in sqlite.execute("SELECT number FROM row ORDER BY number")], steps
        assert savepoints.idle
        sqlite.execute("ROLLBACK")


def test_what_is_done_after_sqlalchemy_rolled_back_cannot_be_rolled_back_again_unlike_after_a_text() -> None:
    savepoints = Savepoints[str]()
    assert not savepoints.may_roll_back
    savepoints.apply(Move.OPEN, "sa_savepoint_1")
    assert savepoints.may_roll_back
    savepoints.apply(Move.ROLL_BACK, "sa_savepoint_1")
    assert not savepoints.may_roll_back
    savepoints.apply(Move.OPEN, "mine")
    savepoints.apply(Move.ROLL_BACK, "mine")
    assert savepoints.may_roll_back
    savepoints.apply(Move.RELEASE, "mine")
    assert not savepoints.may_roll_back


def test_a_witness_goes_back_with_its_savepoint_and_no_number_comes_twice() -> None:
    savepoints: Savepoints[str] = Savepoints()
    assert savepoints.new_witness() == 1
    savepoints.apply(OPEN, "a")
    assert savepoints.needs_witness
    assert savepoints.new_witness() == 2
    assert not savepoints.needs_witness
    savepoints.apply(OPEN, "b")
    assert savepoints.needs_witness
    savepoints.apply(BACK, "a")
    assert savepoints.witness == 1
    assert savepoints.needs_witness
    assert savepoints.new_witness() == 3
    savepoints.apply(RELEASE, "a")
    assert savepoints.witness == 3
