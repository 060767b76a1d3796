"""What people do by hand: its reason is stored before the deed, its outcome after it, and what is said is true."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.failpoints import FailpointError, arm
from dualwrite.protocol.blocking import Deed, Ended, number_ranges
from dualwrite.recovery.recover import RecoveryReport
from dualwrite.writing.by_hand import By, noted, nothing_done, recovery_words

BY = By(actor="anna", reason="the host is gone", program="a test", action_id="1")


@dataclass
class Database:
    """Keeps a history in memory. ``refuses`` makes the outcome fail to be stored."""

    has_history: bool = True
    refuses: bool = False
    intents: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    traits: object = field(default_factory=lambda: SimpleNamespace(name="a database"))

    def history(self):
        return self if self.has_history else None

    def begin_once(self, intent):
        return self.intents.setdefault(intent.action_id, intent) is intent

    def end(self, ends):
        if self.refuses:
            raise Unavailable("it is away")
        self.ends |= {end.action_id: (end.outcome, end.result) for end in ends}


def test_the_reason_is_stored_before_the_deed_and_the_outcome_after_it():
    database = Database()
    with noted(database, Deed.DROP, "orders", "messages 3-5", BY) as note:
        [intent] = database.intents.values()
        assert (intent.deed, intent.subject, intent.detail) == (Deed.DROP, "orders", "messages 3-5")
        assert (intent.actor, intent.reason, intent.program) == ("anna", "the host is gone", "a test")
        assert database.ends == {}
        note.ends(Ended.DONE, "3 messages deleted")
    assert database.ends == {"1": (Ended.DONE, "3 messages deleted")}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (IllegalStateError("decided"), Ended.REFUSED),
        (ConfigurationError("no right"), Ended.REFUSED),
        (Unavailable("Kafka is away"), Ended.FAILED),
        (KeyboardInterrupt(), Ended.FAILED),
    ],
)
def test_what_hinders_it_is_stored_and_raised(error, outcome):
    database = Database()
    with pytest.raises(type(error)), noted(database, Deed.TERMINATE, "orders", "abort", BY):
        raise error
    assert database.ends["1"][0] is outcome
    assert str(error) in database.ends["1"][1]


def test_the_same_action_is_done_once():
    database = Database()
    with noted(database, Deed.SETTLE, "orders", "all", BY):
        pass
    with pytest.raises(IllegalStateError, match="was begun before"), noted(database, Deed.SETTLE, "orders", "all", BY):
        pytest.fail("it was done twice")
    assert database.ends["1"][0] is Ended.DONE


def test_a_process_that_dies_leaves_an_intent_without_an_outcome():
    database = Database()
    arm("action.intended:1:raise")
    try:
        with pytest.raises(FailpointError), noted(database, Deed.SETTLE, "orders", "all", BY):
            pytest.fail("it was done")
    finally:
        arm("")
    assert (list(database.intents), database.ends) == (["1"], {})


def test_nothing_is_done_where_the_reason_cannot_be_stored():
    with (
        pytest.raises(ConfigurationError, match="keeps no history"),
        noted(Database(has_history=False), Deed.SETTLE, "orders", "all", BY),
    ):
        pytest.fail("it was done")


def test_what_is_done_stays_done_if_its_outcome_cannot_be_stored(caplog):
    with noted(Database(refuses=True), Deed.SETTLE, "orders", "all", BY):
        pass
    assert "action 1 is done, which the history does not say" in caplog.text


def test_without_a_reason_nothing_is_stored():
    database = Database()
    with noted(database, Deed.SETTLE, "orders", "all", None):
        pass
    assert database.intents == {}


@pytest.mark.parametrize(
    ("report", "words", "nothing"),
    [
        (RecoveryReport(), "0 ids settled, 0 rolled forward", False),
        (RecoveryReport(skipped=["orders"]), "1 left alone: the owner may be alive", True),
        (RecoveryReport(skipped=["orders"], sent={"orders": 3}), "3 messages sent", False),
        (RecoveryReport(unknown=True), "there is no such id", True),
        (RecoveryReport(settled=["orders"], rolled_forward=["orders"]), "1 id settled, 1 rolled forward", False),
    ],
)
def test_a_recovery_in_words(report, words, nothing):
    assert words in recovery_words(report)
    assert nothing_done(report) is nothing


def test_numbers_in_a_row_are_a_range():
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert number_ranges([]) == ""
