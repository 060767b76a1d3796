"""Mistakes of state stores: what they keep after a crash, what they log, and what they read of their changelogs."""

import pytest

from dualwrite.state import changelog, store, task
from dualwrite.state.entries import Committed, Position, as_text
from dualwrite.state.store import KeyValueStore, Rocks, Spilled
from dualwrite.state.task import LoggedStore
from harness.mistakes.registry import Check, mistake

_TASKS = "integration/test_state_tasks.py::"


@mistake(
    Check(
        "unit/state/test_crashes.py::test_whatever_part_of_a_commit_is_on_disk_all_of_it_counts_or_nothing",
        "assert \\(",
    )
)
def offset_beside_the_data(patch: pytest.MonkeyPatch) -> None:
    """A state store writes its offset after the data, as a checkpoint file would be."""
    write = Rocks.write

    def apart(self, batch, *, note=None, sync=True):
        write(self, batch, sync=sync)
        if note is not None:
            write(self, self.batch(), note=note, sync=sync)

    patch.setattr(Rocks, "write", apart)


@mistake(
    Check(
        "unit/state/test_store.py::test_a_process_killed_in_a_spilled_commit_leaves_all_of_it_or_nothing[spilled:3-False]",
        "assert ",
    )
)
def undecided_writes_committed_at_opening(patch: pytest.MonkeyPatch) -> None:
    """A state store that is opened commits what a dead process had spilled, and not decided."""
    found = as_text(Committed((Position(offset=3),)))
    patch.setattr(store, "is_undecided", lambda _: False)
    patch.setattr(Spilled, "decision", property(lambda self: self._rocks.note() or found))


@mistake(
    Check(
        f"{_TASKS}test_after_a_failure_the_next_block_begins_with_what_kafka_has_committed[state.logged]",
        "assert b'2' == b'1'",
    )
)
def store_commits_before_kafka(patch: pytest.MonkeyPatch) -> None:
    """A task commits its state store when the changelog is produced, before the transaction commits."""
    log = LoggedStore.log

    def too_early(self, tx):
        try:
            log(self, tx)
        finally:
            self.store._held = False
            self.store.commit(None)

    patch.setattr(LoggedStore, "log", too_early)


@mistake(Check(f"{_TASKS}test_a_block_commits_the_store_with_its_changelog", "assert {.* == {"))
def deletions_not_logged(patch: pytest.MonkeyPatch) -> None:
    """A task produces the values that its state store has written, and not the keys that it has deleted."""
    uncommitted = KeyValueStore.uncommitted
    patch.setattr(
        KeyValueStore, "uncommitted", lambda self: [change for change in uncommitted(self) if change[1] is not None]
    )


@mistake(
    Check(
        f"{_TASKS}test_after_a_failure_the_next_block_begins_with_what_kafka_has_committed[state.logged]",
        "assert b'2' == b'1'",
    )
)
def aborted_changelog_applied(patch: pytest.MonkeyPatch) -> None:
    """A state store is restored from all records of its changelog, those of aborted transactions too."""
    real = changelog.Consumer
    patch.setattr(changelog, "Consumer", lambda settings: real({**settings, "isolation.level": "read_uncommitted"}))


@mistake(Check(f"{_TASKS}test_an_old_copy_of_the_directory_is_rolled_forward", "assert 0 == 2"))
def restored_by_the_offset_alone(patch: pytest.MonkeyPatch) -> None:
    """A state store that is behind takes over its changelog's end, and none of its records."""
    patch.setattr(changelog, "first_to_read", lambda _committed, log, _now_ms: log.end)


@mistake(
    Check(
        f"{_TASKS}test_a_store_is_not_written_inside_a_savepoint_which_could_not_take_it_back[begin_nested]",
        "DID NOT RAISE",
    )
)
def store_outlives_a_savepoint(patch: pytest.MonkeyPatch) -> None:
    """A state store is written inside a savepoint, and keeps the write when that is rolled back with its rows and messages."""
    patch.setattr(task, "refuse_in_savepoints", lambda *_: None)
