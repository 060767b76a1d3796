"""Mistakes about atomic units: their writer, and the units of Spark's batches. PySpark is imported where one is planted."""

from __future__ import annotations

import pytest

from dualwrite.units import writer
from dualwrite.units import writer as announcing
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import Follower, UnitWriterEvent
from dualwrite.units.writer import Written
from harness.mistakes.registry import Check, mistake

_UNITS = "integration/test_units.py::"
_TOPIC = "integration/test_unit_topic.py::"
_LEFT = "unit/units/test_log_reader.py::test_a_poll_left_at_any_line_is_continued_exactly_or_refused"


@mistake(
    Check(
        f"{_UNITS}test_a_second_writer_fences_the_first_whose_unit_is_aborted",
        "holds '(begin|part|end)', which cannot stand there",
    )
)
def unfinished_unit_not_aborted(patch: pytest.MonkeyPatch) -> None:
    """A writer of units does not look whether the log ends inside a unit."""
    patch.setattr(writer, "found_at_the_end", lambda _: UnitWriterEvent.FIND_ENDED)


@mistake(Check(f"{_LEFT}[KeyedImage]", "assert |which cannot stand there"))
def what_an_exception_has_dropped_not_read_again(patch: pytest.MonkeyPatch) -> None:
    """A reader of units that an exception has left goes on behind the records that its consumer had handed out."""
    patch.setattr(PartitionLogs, "_exact", property(lambda _: True, lambda *_: None), raising=False)


@mistake(Check(f"{_LEFT}[Counts]", "assert |which cannot stand there"))
def interrupted_record_applied_again(patch: pytest.MonkeyPatch) -> None:
    """A reader of units applies a record again, though an exception may have struck after the image took it."""
    read = Follower.read

    def again(self, offset, record):
        self._begun = self._applied = -1
        return read(self, offset, record)

    patch.setattr(Follower, "read", again)


@mistake(Check(f"{_TOPIC}test_a_batch_that_is_written_in_part_is_not_visible_until_all_of_it_is", "DID NOT RAISE"))
def batch_announced_beside_another(patch: pytest.MonkeyPatch) -> None:
    """A Spark driver announces its batch although another one of the sink is written in part."""
    from dualwrite.sinks.spark.plan import DriverSide

    patch.setattr(DriverSide, "_written_to", lambda self, _: Written(self._batch_id, {}))


@mistake(
    Check(f"{_TOPIC}test_a_driver_that_was_paused_before_it_announces_finds_a_part_of_the_next_batch", "DID NOT RAISE")
)
def other_batches_looked_for_too_early(patch: pytest.MonkeyPatch) -> None:
    """A Spark driver looks for other batches of its sink before it owns the unit topic, and not afterwards."""
    from dualwrite.sinks.spark.plan import DriverSide

    real_announce, real_written = DriverSide.announce, DriverSide._written_to

    def announce(self):
        found = real_written(self, self._options.topic)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_written_to", lambda _: found, raising=False)
            real_announce(self)

    patch.setattr(DriverSide, "announce", announce)


@mistake(
    Check(
        f"{_TOPIC}test_a_driver_that_was_paused_before_it_announces_finds_a_later_batch_and_announces_it_by_its_name",
        "ConfigurationError|assert .* ==|At index",
    )
)
def unit_named_after_the_batch_of_its_driver(patch: pytest.MonkeyPatch) -> None:
    """A Spark driver takes all that it finds for its own batch, though a later one of the sink was written meanwhile."""
    from dualwrite.sinks.spark import plan

    real = plan.DriverSide._written_to
    patch.setattr(plan.DriverSide, "_written_to", lambda self, topic: real(self, topic)._replace(newest=self._batch_id))
    patch.setattr(announcing, "_require_new", lambda *_: None)


@mistake(
    Check(
        f"{_TOPIC}test_a_stream_that_dies_while_it_announces_a_micro_batch_announces_it_when_it_is_run_again"
        "[staging-unit.batch]",
        "assert .* ==|At index|/1",
    )
)
def written_batch_not_announced(patch: pytest.MonkeyPatch) -> None:
    """A Spark driver announces only a batch that this run has written: the one whose driver died before that comes later."""
    from dualwrite.sinks.spark.whole_batch import WholeBatch

    def decide(self, layout, prepared, **options):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "announce", lambda: None, raising=False)
            written = real(self, layout, prepared, **options)
        if written:
            self.announce()
        return written

    real = WholeBatch.decide
    patch.setattr(WholeBatch, "decide", decide)


@mistake(Check(f"{_TOPIC}test_a_batch_is_announced_once_when_it_is_complete[write_batch]", "assert"))
def unit_of_all_that_the_topic_holds(patch: pytest.MonkeyPatch) -> None:
    """A batch's unit begins where the topic does, not where the last unit ended."""
    patch.setattr(announcing, "last_ranges", lambda *_: None)
