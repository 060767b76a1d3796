"""Mistakes of group commit: what is left of a unit that was rolled back, what callers hear and when, and what runs again."""

from collections.abc import Sequence
from typing import Any

import pytest

from dualwrite.asyncio import writer
from dualwrite.errors import TransactionInDoubt
from dualwrite.protocol import message
from dualwrite.protocol.grouping import Fate, Unit
from dualwrite.protocol.message import Savepoints
from dualwrite.writing import transaction, units_of_work
from dualwrite.writing.units_of_work import GroupRun, Uses
from harness.mistakes.registry import Check, mistake

_GROUPS = "unit/writing/group/test_groups.py::"
_KILLED = "integration/test_group_commit.py::test_a_group_killed_in_the_middle_leaves_both_sides_equal"


@mistake(
    Check("unit/writing/group/test_divided.py::test_a_unit_that_fails_is_rolled_back_alone", "assert "),
    Check("integration/test_group_commit.py::test_each_unit_is_whole_or_nowhere[postgresql]", "assert "),
)
def messages_of_a_dropped_unit_sent(patch: pytest.MonkeyPatch) -> None:
    """The messages of a unit that was rolled back are sent with those of its group."""
    real = Savepoints.apply

    def apply(self: Savepoints[Any], move: Any, name: str) -> None:
        waiting = [list(savepoint.messages) for savepoint in self._open]
        real(self, move, name)
        for savepoint, messages in zip(self._open, waiting, strict=False):
            savepoint.messages[:] = messages if len(messages) > len(savepoint.messages) else savepoint.messages

    patch.setattr(Savepoints, "apply", apply)


@mistake(
    Check(
        "unit/writing/group/test_divided.py::test_the_connection_of_a_unit_ends_with_it[statement-True]",
        "DID NOT RAISE",
    ),
    Check("unit/asyncio/test_group_commit.py::test_a_part_that_outlives_its_unit_writes_nothing", "assert "),
)
def the_connection_of_a_unit_outlives_it(patch: pytest.MonkeyPatch) -> None:
    """A part of a unit that goes on after the unit was rolled back writes into the commit of the others."""
    patch.setattr(Uses, "require", lambda _: None)


@mistake(
    Check("unit/asyncio/test_group_commit.py::test_a_unit_whose_callers_coroutine_is_closed_does_not_begin", "assert "),
    Check(
        "unit/asyncio/test_group_commit.py::test_a_unit_that_has_not_begun_in_time_never_runs", "assert |TimeoutError"
    ),
)
def the_unit_of_a_caller_who_has_gone_committed(patch: pytest.MonkeyPatch) -> None:
    """A unit whose caller has gone before it began is committed, though nobody waits for it."""

    def begin(self: writer._Task) -> bool:
        self._runs = True
        return True

    patch.setattr(writer._Task, "begin", begin)


@mistake(
    Check(
        "integration/test_group_commit.py::test_a_message_that_waits_has_the_headers_of_its_call[native-postgresql]",
        "assert ",
    ),
    Check(
        "integration/test_group_commit.py::test_a_message_that_waits_has_the_headers_of_its_call[librdkafka-postgresql]",
        "assert ",
    ),
)
def a_message_that_waits_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A message that waits for its savepoint or unit is sent with what its caller has made of its headers since."""
    real = message.as_headers

    class Shared:
        """Read whenever they are needed."""

        def __init__(self, headers: Any) -> None:
            self._headers = headers

        def __iter__(self) -> Any:
            return iter(real(self._headers))

        def __len__(self) -> int:
            return len(self._headers)

    patch.setattr(message, "as_headers", Shared)


@mistake(Check(f"{_GROUPS}test_a_mistake_in_a_message_is_told_at_the_call_and_fails_no_other_unit[value]", "assert "))
def a_bad_message_found_at_the_end_of_its_group(patch: pytest.MonkeyPatch) -> None:
    """A message that no producer takes is checked when its group ends, so that all units of the group run again."""

    real = message.Message

    class Unchecked(real):
        """Not checked before it is handed to the engine."""

        @classmethod
        def checked(cls, topic: str, value: Any, key: Any = None, **parts: Any) -> Any:
            names = ("partition", "headers", "timestamp_ms", "on_delivery")
            return real(topic, value, key, *map(parts.get, names), 0)._replace(headers=parts.get("headers") or ())

    patch.setattr(transaction, "Message", Unchecked)


@mistake(Check(f"{_KILLED}[write.recorded:2-postgresql]", "lost|acknowledged"))
def callers_told_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """A caller has its result as soon as its unit has run, before its group commits."""
    real = GroupRun.ended

    def ended(self: GroupRun, unit: Unit[Any], result: object, error: BaseException | None) -> None:
        real(self, unit, result, error)
        if error is None:
            unit.work.succeed(result)

    patch.setattr(GroupRun, "ended", ended)
    patch.setattr(units_of_work, "_succeeded", lambda *_: lambda: None)


@mistake(Check(f"{_GROUPS}test_in_doubt_reaches_every_unit_and_none_runs_again", "assert |twice|UNIQUE|Timeout"))
def units_run_again_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """Units run again after the answer to the COMMIT of their group was lost, though it may have committed."""
    real = units_of_work.after_group

    def after_group(error: BaseException, *, units: int, failures: int) -> Fate:
        if isinstance(error, TransactionInDoubt) and failures == 1:
            return Fate.TOGETHER
        return real(error, units=units, failures=failures)

    patch.setattr(units_of_work, "after_group", after_group)


@mistake(Check(f"{_GROUPS}test_units_of_a_key_wait_for_one_that_runs_again", "assert "))
def units_of_a_key_overtaken(patch: pytest.MonkeyPatch) -> None:
    """A unit runs although an earlier one of its key has failed in this group and runs again later."""
    real = GroupRun.begins

    def begins(self: GroupRun, unit: Unit[Any]) -> bool:
        self._postponed.clear()
        return real(self, unit)

    patch.setattr(GroupRun, "begins", begins)


@mistake(Check("unit/writing/group/test_results.py::test_a_unit_that_failed_by_itself_fails_alone", "assert "))
def a_failed_unit_fails_its_group(patch: pytest.MonkeyPatch) -> None:
    """The caller of a unit that is committed hears the error of another unit of its group."""
    real = GroupRun.committed

    def committed(self: GroupRun) -> Sequence[units_of_work.Answer]:
        told = real(self)
        error = next(iter(self._errors.values()), None)
        return told if error is None else [units_of_work._failed(unit, error) for unit in self._results]

    patch.setattr(GroupRun, "committed", committed)
