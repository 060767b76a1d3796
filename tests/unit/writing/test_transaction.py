"""The transaction object shows users only what they may use."""

from dualwrite import Transaction


def test_a_transaction_shows_none_of_the_verbs_that_end_it():
    assert {name for name in dir(Transaction) if not name.startswith("_")} == {
        "connection",
        "prepared",
        "produce",
        "produce_many",
        "send_offsets_to_transaction",
        "session",
        "state",
        "transactional_id",
    }
