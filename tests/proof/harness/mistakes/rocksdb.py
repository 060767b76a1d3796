"""Mistakes about RocksDB: what is written in one batch, what is compared, and what is believed after a failed write."""

import pytest

from dualwrite.stores.keyed.rocksdb import Client, RocksKeys
from harness.mistakes.registry import Check, mistake

UNIT = "unit/stores/keyed"


@mistake(Check(f"{UNIT}/test_rocksdb_keys.py::test_all_of_a_decision_is_in_one_synced_batch[typed]", "\\(4, False\\)"))
def rocksdb_decision_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A decision in RocksDB is written without a sync, as its own default is."""
    real = Client.__init__

    def init(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self._synced.sync = False

    patch.setattr(Client, "__init__", init)


@mistake(
    Check(f"{UNIT}/test_rocksdb_keys.py::test_all_of_a_decision_is_in_one_synced_batch[typed]", "\\[\\(2, True\\)")
)
def rocksdb_state_in_a_second_batch(patch: pytest.MonkeyPatch) -> None:
    """RocksDB gets the user's entries first, and then the state, each in a batch of its own."""

    def put(self, batch, changes):
        if len(batch):
            self._client.write(batch)
            batch = self._client.new_batch()
            put_into(self, batch, changes)
            self._client.write(batch)
        else:
            put_into(self, batch, changes)

    put_into = RocksKeys._put
    patch.setattr(RocksKeys, "_put", put)
    write = Client.write
    patch.setattr(Client, "write", lambda self, batch: write(self, batch) if _is_unused(batch) else None)


def _is_unused(batch) -> bool:
    try:
        return len(batch) >= 0
    except Exception:  # noqa: BLE001 - rocksdict raises Exception itself
        return False


@mistake(
    Check(
        f"{UNIT}/test_rocksdb_store.py::test_an_owner_that_is_claimed_away_after_its_last_check_cannot_commit",
        "DID NOT RAISE",
    )
)
def rocksdb_row_not_compared_at_the_commit(patch: pytest.MonkeyPatch) -> None:
    """An owner in RocksDB looks at its row before the commit, and not in the critical section in which it writes."""
    patch.setattr(RocksKeys, "_as_expected", lambda *_: True)


@mistake(
    Check(
        f"{UNIT}/test_rocksdb_store.py::test_a_failed_commit_is_resolved_by_what_is_durable[True-True]",
        "DoubtStep.ABORTED",
    )
)
def rocksdb_read_on_after_a_failed_write(patch: pytest.MonkeyPatch) -> None:
    """After a failed write a doubt is resolved by what the open RocksDB shows, not by what the next start recovers."""
    patch.setattr(Client, "_open_again", lambda *_: None)
