"""Errors for two sides that do not belong together: each names the evidence and a way on that works."""

from dualwrite.errors import ConfigurationError, DatabaseWentBack
from dualwrite.protocol.mismatch import gone_back, other_cluster


def test_another_cluster_is_refused_by_both_names_as_nothing_was_changed():
    error = other_cluster("the row's", "the server's", "orders")
    assert type(error) is ConfigurationError, "the database has not gone back: no recovery after a restore may follow"
    assert (error.transactional_id, error.outcome) == ("orders", "none")
    assert '"the row\'s"' in str(error)
    assert '"the server\'s"' in str(error)


def test_a_database_that_went_back_is_named_with_the_evidence_and_what_it_has_forgotten():
    error = gone_back("the row names incarnation 1", "orders", "42:0;i=2")
    assert isinstance(error, DatabaseWentBack)
    assert (error.transactional_id, error.state) == ("orders", "42:0;i=2")
    assert error.what.startswith("the row names incarnation 1: ")


def test_a_lost_claim_names_no_decision():
    assert gone_back("the row names incarnation 1", "orders").state is None


def test_a_recovery_after_a_restore_is_advised_only_where_opening_alone_does_not_go_on():
    recorded, blocked = (gone_back("seen", "orders", "42:0", recorded=recorded) for recorded in (True, False))
    assert "recover --after-restore" in blocked.next_step
    assert "after-restore" not in recorded.next_step
    assert "the next opening of the writer succeeds" in recorded.next_step
