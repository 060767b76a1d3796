"""Two sides that do not belong together: errors that name the evidence and a way on that works, and versions of tables."""

import pytest

from dualwrite.errors import ConfigurationError, DatabaseWentBack
from dualwrite.protocol.values import TableFit, gone_back, other_cluster, table_fit


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


@pytest.mark.parametrize(
    ("found", "own", "fit"),
    [
        ("0005", "0005", TableFit.SAME),
        ("0005_contract", "0005_contract", TableFit.SAME),
        ("0004", "0005", TableFit.OLDER),
        ("0004_contract", "0005", TableFit.OLDER),
        ("0004", "0005_contract", TableFit.OLDER),
        ("0006", "0005", TableFit.NEWER),
        ("0006", "0005_contract", TableFit.NEWER),
        ("0006_contract", "0005", TableFit.CONTRACTED),
        ("0003", "0005", TableFit.TOO_OLD),
        ("0007", "0005", TableFit.TOO_NEW),
        ("0007_contract", "0005", TableFit.TOO_NEW),
        ("10000", "0005", TableFit.TOO_NEW),
        ("0006_rename", "0005", TableFit.TOO_NEW),
    ],
)
def test_a_program_takes_the_tables_of_the_version_before_and_of_the_next_one_if_that_only_adds(found, own, fit):
    assert table_fit(found, own) is fit
