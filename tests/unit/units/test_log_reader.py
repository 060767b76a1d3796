"""A reader whose calls are left by an exception: it goes on exactly, or refuses; it never shows a part of a unit."""

import itertools

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError
from harness.interruption import Interruption
from harness.simulated_units import _message

from dualwrite import ConfigurationError
from dualwrite.errors import IllegalStateError
from dualwrite.units import (
    AbortTransaction,
    BatchRange,
    BatchReader,
    BeginTransaction,
    EndTransaction,
    KeyedImage,
    UnitReader,
    UnitRecord,
    log,
)
from dualwrite.units.records import marker_record, part_of_unit

BEGIN, END, ABORT = (marker_record(kind()) for kind in (BeginTransaction, EndTransaction, AbortTransaction))
NAME = "units", 0
AT_ONCE = 4
"""How many messages the consumer hands out in one call: some units are within it, others are not."""


POLLS = 6
"""More than it takes to read the log."""


class Log:
    """A partition's records and the consumer that reads them. Retention may delete the first ones."""

    def __init__(self, records, patch):
        self.records = records
        self.begin = 0
        self.at = 0
        patch.setattr(log, "Consumer", lambda _: self)
        patch.setattr(log, "AdminClient", lambda _: None)

    def assign(self, partitions):
        [given] = partitions
        self.at = self.begin if given.offset == OFFSET_BEGINNING else given.offset

    def poll(self, _timeout):
        if self.at < self.begin:
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "out of range")
            return _failed(NAME, error)
        return next(iter(self.consume(1, 0)), None)

    def consume(self, count, _timeout):
        taken = list(enumerate(self.records))[self.at : min(self.at + count, self.at + AT_ONCE)]
        self.at += len(taken)
        return [_message(NAME, offset, record) for offset, record in taken]

    def close(self):
        pass


def _failed(name, error):
    message = _message(name, 0, UnitRecord(None, None))
    message.error = lambda: error
    return message


def part(key, value):
    return part_of_unit(key.encode(), value.encode())


def unit(value):
    return [BEGIN, *(part(key, value) for key in "ab"), END]


RECORDS = [*unit("1"), BEGIN, part("a", "no"), ABORT, UnitRecord(b"z", b"1", ()), *unit("2")]


def at_every_line():
    """An interruption at the first line of the library, at the second, and so on; the last one at none."""
    for line in itertools.count(1):
        yield (one := Interruption(line))
        if one.at is None:
            return


class Counts:
    """An image that a record must reach once: it counts what was published."""

    def __init__(self):
        self.shown, self._held = 0, 0

    def apply(self, _record):
        self._held += 1

    def publish(self):
        self.shown += self._held
        self._held = 0

    def revert(self):
        self._held = 0

    def contents(self):
        return self.shown


def parts_shown(image):
    """Whether an image shows a part of a unit."""
    if isinstance(image, Counts):
        return image.shown not in {0, 2, 3, 5}
    shown = image.contents()
    return shown.get(b"a") != shown.get(b"b")


@pytest.mark.parametrize("kind", [KeyedImage, Counts])
def test_a_poll_left_at_any_line_is_continued_exactly_or_refused(monkeypatch, kind):
    ends = set()
    for interruption in at_every_line():
        source = Log(RECORDS, monkeypatch)
        image = kind()
        with UnitReader(*NAME, kafka={"bootstrap.servers": "localhost:1"}, image=image) as reader:
            told = False
            try:
                with interruption.armed():
                    for _ in range(POLLS):
                        told |= reader.poll(0)
            except KeyboardInterrupt:
                assert isinstance(image, Counts) or not parts_shown(image), interruption.at
            try:
                for _ in range(POLLS):
                    told |= reader.poll(0)
                    assert not parts_shown(image), interruption.at
            except IllegalStateError:
                ends.add("refused")
                with pytest.raises(IllegalStateError, match="was interrupted while it applied offset"):
                    reader.poll(0)
                assert isinstance(image, Counts) or not parts_shown(image), interruption.at
                if (taken := _snapshot(reader)) is not None:
                    _continued(taken, kind, monkeypatch)
            else:
                ends.add("went on")
                assert (source.at, told) == (len(RECORDS), True)
                _complete(image)
                assert reader.snapshot().position == len(RECORDS)
    assert ends == {"refused", "went on"}


def _snapshot(reader):
    try:
        return reader.snapshot()
    except IllegalStateError:
        return None


def _continued(taken, kind, patch):
    """A snapshot of a reader that refuses is right, if there is one: the next reader ends as any other."""
    image = kind() if kind is Counts else KeyedImage(taken.contents)
    if kind is Counts:
        image.shown = taken.contents
    Log(RECORDS, patch)
    with UnitReader(*NAME, kafka={"bootstrap.servers": "localhost:1"}, image=image, position=taken.position) as again:
        for _ in range(POLLS):
            again.poll(0)
    _complete(image)


def _complete(image):
    if isinstance(image, Counts):
        assert image.shown == 5
    else:
        assert image.contents() == {**dict.fromkeys([b"a", b"b"], b"2"), b"z": b"1"}


def test_a_reader_that_has_met_a_foreign_record_stays_before_it(monkeypatch):
    Log(
        [*unit("1"), BEGIN, part("a", "2"), UnitRecord(b"foreign", b"1", ()), part("b", "2"), END, *unit("3")],
        monkeypatch,
    )
    image = KeyedImage()
    with UnitReader(*NAME, kafka={"bootstrap.servers": "localhost:1"}, image=image) as reader:
        reader.poll(0)
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="offset 6 holds 'record'.* at 'inside'"):
                reader.poll(0)
        assert image.contents() == dict.fromkeys([b"a", b"b"], b"1")


def test_a_reader_whose_log_was_deleted_under_it_does_not_go_on(monkeypatch):
    source = Log(RECORDS[:3], monkeypatch)
    image = KeyedImage()
    with UnitReader(*NAME, kafka={"bootstrap.servers": "localhost:1"}, image=image) as reader:
        reader.poll(0)
        source.records, source.begin = RECORDS, 5
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="the records to read next are deleted"):
                reader.poll(0)
        assert image.contents() == {}


def announced(name):
    return [BEGIN, *(part(key, BatchRange(name, "data", int(key), 0, 1).encoded().decode()) for key in "01"), END]


def test_a_reader_of_batches_that_was_left_at_any_line_hands_each_out_once_and_whole_or_refuses(monkeypatch):
    records = [*announced("one"), BEGIN, ABORT, *announced("two")]
    ends = set()
    for interruption in at_every_line():
        Log(records, monkeypatch)
        handed_out = []
        with BatchReader(NAME[0], kafka={"bootstrap.servers": "localhost:1"}) as reader:

            def read_on(reader=reader, handed_out=handed_out):
                while (batch := reader.next_batch(0)) is not None:
                    handed_out.append(batch)

            try:
                with interruption.armed():
                    read_on()
            except KeyboardInterrupt:
                pass
            try:
                for _ in range(POLLS):
                    read_on()
            except IllegalStateError:
                ends.add("refused")
            else:
                ends.add("went on")
                assert len(handed_out) == 2, interruption.at
        assert [batch.name for batch in handed_out] == ["one", "two"][: len(handed_out)], interruption.at
        assert all(len(batch.ranges) == 2 for batch in handed_out), interruption.at
    assert ends == {"refused", "went on"}
