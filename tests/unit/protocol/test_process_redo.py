"""Work runs again only after errors that certainly left nothing behind."""

from collections.abc import Iterator

import pytest

from dualwrite.errors import (
    ChangelogDiffers,
    CompletionPending,
    ConfigurationError,
    DatabaseWentBack,
    DecidedTransactionLost,
    DualWriteError,
    Fenced,
    IllegalStateError,
    OutcomeUnverifiable,
    StoreInUse,
    StoreTooOld,
    StoreUnreadable,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.protocol.database_requirements import mariadb_durability, replica
from dualwrite.protocol.findings import read_only, standby
from dualwrite.protocol.process import Redo, redo_after

OUTCOMES = ["none", "aborted", "decided", "lost", "unknown"]
EXPECTED = {
    TransactionAborted: Redo.AGAIN,
    Unavailable: Redo.AGAIN,
    ConfigurationError: Redo.USELESS,
    DatabaseWentBack: Redo.USELESS,
    ChangelogDiffers: Redo.USELESS,
    StoreInUse: Redo.USELESS,
    StoreTooOld: Redo.USELESS,
    StoreUnreadable: Redo.USELESS,
    IllegalStateError: Redo.USELESS,
    Fenced: Redo.USELESS,
    TransactionInDoubt: Redo.UNSAFE,
    CompletionPending: Redo.UNSAFE,
    DecidedTransactionLost: Redo.UNSAFE,
    OutcomeUnverifiable: Redo.UNSAFE,
}


def kinds(of: type[DualWriteError] = DualWriteError) -> Iterator[type[DualWriteError]]:
    for kind in of.__subclasses__():
        if kind.__module__ == "dualwrite.errors":
            yield kind
            yield from kinds(kind)


def test_there_is_a_rule_for_every_error() -> None:
    assert set(kinds()) == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_class_says_what_may_follow(kind: type[DualWriteError]) -> None:
    assert redo_after(kind("what")) is EXPECTED[kind]


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("kind", EXPECTED)
def test_an_outcome_that_is_not_nothing_forbids_another_run(kind: type[DualWriteError], outcome: str) -> None:
    error = kind("what")
    error.outcome = outcome
    if outcome in {"none", "aborted"}:
        assert redo_after(error) is EXPECTED[kind]
    else:
        assert redo_after(error) is Redo.UNSAFE


def test_an_abort_that_is_not_retryable_would_only_happen_again() -> None:
    assert redo_after(TransactionAborted("what", retryable=False)) is Redo.USELESS


def test_a_standby_may_be_promoted_meanwhile() -> None:
    assert redo_after(standby(is_standby=True).as_error()) is Redo.AGAIN
    assert redo_after(read_only("on").as_error()) is Redo.AGAIN
    assert redo_after(replica(is_replica=True).as_error()) is Redo.AGAIN
    assert redo_after(mariadb_durability("ON", "1", "OFF", "1")[0].as_error()) is Redo.AGAIN
    assert redo_after(mariadb_durability("OFF", "0", "OFF", "1")[1].as_error()) is Redo.USELESS


def test_an_unknown_error_of_the_library_is_unsafe_and_a_subclass_is_judged_as_its_class() -> None:
    class New(DualWriteError):
        outcome = "aborted"

    class Conflict(TransactionAborted):
        pass

    assert redo_after(New("what")) is Redo.UNSAFE
    assert redo_after(Conflict("what")) is Redo.AGAIN


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), GeneratorExit(), TimeoutError()])
def test_errors_of_the_work_are_foreign(error: BaseException) -> None:
    assert redo_after(error) is Redo.FOREIGN
