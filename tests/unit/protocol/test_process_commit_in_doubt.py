"""The decision about a COMMIT whose answer is missing, over the whole space of what can be known."""

from dataclasses import replace
from itertools import product

from dualwrite.protocol.prepared_state import FirstOffset, PreparedTxnState
from dualwrite.protocol.process import DatabaseVerdict, Doubt, DoubtStep, next_doubt_step
from dualwrite.protocol.values import LogProof, Outcome


def state(incarnation: int, offset: int) -> PreparedTxnState:
    return PreparedTxnState(42, 0, incarnation, (FirstOffset("orders", 0, offset),))


OURS = state(5, 100)
OLDER, NEWER = state(5, 90), state(6, 120)
ALL = [
    Doubt(OURS, row, verdict, asked, incident if asked else None, proof)
    for row, verdict, asked, incident, proof in product(
        [OURS, OLDER, NEWER, PreparedTxnState(), state(4, 10)],
        [None, *DatabaseVerdict],
        [False, True],
        [None, Outcome.LOST, Outcome.UNVERIFIABLE],
        [None, *LogProof],
    )
]


def test_the_row_that_names_us_is_committed_and_one_that_nobody_wrote_over_is_aborted():
    for doubt in ALL:
        if doubt.row == OURS:
            assert next_doubt_step(doubt) is DoubtStep.COMMITTED
        elif doubt.row != NEWER:
            assert next_doubt_step(doubt) is DoubtStep.ABORTED


def test_an_overwritten_row_asks_the_database_then_the_records_then_the_log():
    assert next_doubt_step(Doubt(OURS, NEWER)) is DoubtStep.ASK_DATABASE
    assert next_doubt_step(Doubt(OURS, NEWER, DatabaseVerdict.UNKNOWN)) is DoubtStep.ASK_RECORDS
    assert next_doubt_step(Doubt(OURS, NEWER, DatabaseVerdict.UNKNOWN, records_asked=True)) is DoubtStep.ASK_LOG


def test_the_databases_word_is_exact():
    for doubt in ALL:
        if doubt.row == NEWER and doubt.verdict is DatabaseVerdict.ABORTED:
            assert next_doubt_step(doubt) is DoubtStep.ABORTED
    done = Doubt(OURS, NEWER, DatabaseVerdict.COMMITTED, records_asked=True)
    assert next_doubt_step(done) is DoubtStep.COMMITTED


def test_an_aborted_marker_with_a_recorded_loss_is_a_loss_and_without_one_an_abort():
    lost = Doubt(OURS, NEWER, DatabaseVerdict.UNKNOWN, True, Outcome.LOST, LogProof.ABORTED)
    aborted = Doubt(OURS, NEWER, DatabaseVerdict.UNKNOWN, True, None, LogProof.ABORTED)
    assert next_doubt_step(lost) is DoubtStep.LOST
    assert next_doubt_step(aborted) is DoubtStep.ABORTED


def test_what_the_log_cannot_tell_stays_in_doubt():
    for proof in (LogProof.OPEN, LogProof.UNKNOWABLE):
        doubt = Doubt(OURS, NEWER, DatabaseVerdict.UNKNOWN, True, None, proof)
        assert next_doubt_step(doubt) is DoubtStep.IN_DOUBT


def test_of_rows_alone_only_the_database_knows():
    for row, proof in product([OURS, NEWER, PreparedTxnState()], [None, *LogProof]):
        alone = Doubt(PreparedTxnState(), row, proof=proof)
        assert next_doubt_step(alone) is DoubtStep.ASK_DATABASE
        told = {
            DatabaseVerdict.COMMITTED: DoubtStep.COMMITTED,
            DatabaseVerdict.ABORTED: DoubtStep.ABORTED,
            DatabaseVerdict.UNKNOWN: DoubtStep.IN_DOUBT,
        }
        assert {verdict: next_doubt_step(replace(alone, verdict=verdict)) for verdict in DatabaseVerdict} == told


MARKED = {LogProof.COMMITTED, LogProof.PARTLY}


def test_never_committed_without_the_rows_the_databases_or_the_logs_word():
    for doubt in ALL:
        if next_doubt_step(doubt) is DoubtStep.COMMITTED:
            assert doubt.row == OURS or doubt.verdict is DatabaseVerdict.COMMITTED or doubt.proof in MARKED
