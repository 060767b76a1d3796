"""The writer of units with every outcome of a dual write, and owners that come, die and return: a reader sees no part of a unit."""

import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

import pytest
from harness.interruption import Interruption
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dualwrite import CompletionPending, DualWriteError, Fenced, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.errors import IllegalStateError
from dualwrite.protocol.lives import WriteState
from dualwrite.units import Follower, KeyedImage, UnitRecord, UnitWriter, writer
from dualwrite.units.records import UnitWriterState, event_of

FATES = {
    # What a dual write leaves in the log, the state that it shows, and its error.
    "commits": (True, WriteState.COMPLETED, None),
    "aborts": (False, WriteState.ABORTED, TransactionAborted),
    "follows later": (True, WriteState.DECIDED, CompletionPending),
    "doubt, committed": (True, WriteState.IN_DOUBT, TransactionInDoubt),
    "doubt, aborted": (False, WriteState.IN_DOUBT, TransactionInDoubt),
    "interrupted, committed": (True, WriteState.RECORDED, KeyboardInterrupt),
    "interrupted, aborted": (False, WriteState.ABORTED, KeyboardInterrupt),
}


class Servers:
    """A partition's log and the row of its writer's id, with `DualWriter` and `PartitionLogs` over them."""

    def __init__(self, patch):
        patch.setattr(writer, "DualWriter", self.dual_writer)
        patch.setattr(writer, "PartitionLogs", self.partition_logs)
        self.log = []
        self.incarnation = 0
        self.fate = "commits"

    def dual_writer(self, *_, **__):
        return Owner(self)

    def partition_logs(self, _):
        def last_event(*_):
            return event_of(self.log[-1].headers) if self.log else None

        return SimpleNamespace(close=lambda: None, partitions=lambda *_: [0], last_event=last_event)


class Owner:
    transactional_id = "topic-0.units"

    def __init__(self, servers):
        self.servers = servers
        self.incarnation = None
        self.dead = False

    def open(self):
        self.servers.incarnation += 1
        self.incarnation = self.servers.incarnation

    def close(self):
        self.dead = True

    @contextmanager
    def transaction(self):
        if self.dead or self.incarnation is None:
            raise Unavailable("dead")
        sent = []
        tx = SimpleNamespace(
            state=WriteState.CHECKED,
            produce=lambda _, value, key, *, headers, **_named: sent.append(UnitRecord(key, value, tuple(headers))),
        )
        try:
            yield tx
        except BaseException:
            tx.state = WriteState.ABORTED
            raise
        if self.incarnation != self.servers.incarnation:
            tx.state = WriteState.ABORTED
            raise Fenced("another owner")
        fate, self.servers.fate = self.servers.fate, "commits"
        kept, tx.state, error = FATES[fate]
        if kept:
            self.servers.log += sent
        if error is not None:
            raise error(fate)


def unit_writer(part_records=2):
    return UnitWriter("topic", kafka={}, database="sqlite://", part_records=part_records)


def follow(log):
    follower = Follower(KeyedImage())
    for offset, record in enumerate(log):
        follower.read(offset, record)
    return {key.decode() for key in follower.snapshot().contents}


fates = some.just("commits") | some.sampled_from(list(FATES))


class Units(RuleBasedStateMachine):
    """One writer, and a former one that still runs: each opened, killed and fenced at any moment, in units of any length."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.servers = Servers(self.patch)
        self.owners = []
        self.sizes = []
        self.whole, self.gone = set(), set()
        self.follower, self.read = Follower(KeyedImage()), 0

    def teardown(self):
        self.patch.undo()

    def inside(self):
        return [one for one in self.owners if one.block is not None]

    def between(self):
        return [one for one in self.owners if one.block is None and one.writer.state is UnitWriterState.BETWEEN]

    @rule(parts=some.integers(1, 3), fate=fates)
    def open(self, parts, fate):
        made = SimpleNamespace(writer=unit_writer(parts), block=None, unit=None, number=None)
        self.servers.fate = fate
        with suppress(DualWriteError, KeyboardInterrupt):
            made.writer.open()
        self.owners = [*self.owners[-1:], made]

    @precondition(lambda self: self.between())
    @rule(data=some.data())
    def begin(self, data):
        one = data.draw(some.sampled_from(self.between()))
        one.block, one.number = one.writer.unit(), len(self.sizes)
        one.unit = one.block.__enter__()
        self.sizes.append(0)

    @precondition(lambda self: self.inside())
    @rule(data=some.data(), count=some.integers(1, 5), fate=fates)
    def produce(self, data, count, fate):
        one = data.draw(some.sampled_from(self.inside()))
        for _ in range(count):
            self.servers.fate = fate
            try:
                one.unit.produce(b"v", f"{one.number}-{self.sizes[one.number]}".encode())
            except (DualWriteError, KeyboardInterrupt) as error:
                self._leave(one, error)
                return
            self.sizes[one.number] += 1

    @precondition(lambda self: self.inside())
    @rule(data=some.data(), fate=fates)
    def end(self, data, fate):
        one = data.draw(some.sampled_from(self.inside()))
        self.servers.fate = fate
        try:
            one.block.__exit__(None, None, None)
        except CompletionPending:
            self.whole.add(one.number)
        except (TransactionAborted, Fenced):
            self.gone.add(one.number)
        except (DualWriteError, KeyboardInterrupt):
            pass  # it may be either
        else:
            self.whole.add(one.number)
        one.block = None

    @precondition(lambda self: self.inside())
    @rule(data=some.data(), fate=fates, dies=some.booleans())
    def fail(self, data, fate, dies):
        one = data.draw(some.sampled_from(self.inside()))
        one.writer._writer.dead = dies
        self.servers.fate = fate
        self._leave(one, ValueError("no"))

    def _leave(self, one, error):
        self.gone.add(one.number)
        with suppress(type(error), KeyboardInterrupt):
            one.block.__exit__(type(error), error, None)
        one.block = None

    def shown(self):
        return Counter(int(key.split(b"-")[0]) for key in self.follower.snapshot().contents)

    @invariant()
    def a_reader_sees_whole_units_only(self):
        self.servers.fate = "commits"
        for record in self.servers.log[self.read :]:
            self.follower.read(self.read, record)
            self.read += 1
            for number, count in self.shown().items():
                assert count == self.sizes[number]
                assert number not in self.gone
        assert {number for number in self.whole if self.sizes[number]} <= self.shown().keys()

    @precondition(lambda self: self.servers.log)
    @rule()
    def an_open_writer_has_ended_every_unit(self):
        made = unit_writer()
        made.open()
        self.owners = [*self.owners[-1:], SimpleNamespace(writer=made, block=None, unit=None, number=None)]
        assert self.servers.log[-1].headers[0][1] in {b"end", b"abort"}


TestUnits = Units.TestCase
TestUnits.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.fixture
def servers(monkeypatch):
    return Servers(monkeypatch)


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("place", ["first part", "later part", "end", "whole", "abort"])
def test_a_unit_with_each_outcome_in_each_place_is_whole_or_gone(servers, fate, place):
    kept, state, error = FATES[fate]
    one = unit_writer(1 if place != "whole" else 100)
    one.open()
    try:
        with one.unit() as unit:
            if place == "first part":
                servers.fate = fate
            unit.produce(b"v", b"a")
            if place == "later part":
                servers.fate = fate
            unit.produce(b"v", b"b")
            if place in {"end", "whole", "abort"}:
                servers.fate = fate
            if place == "abort":
                raise ValueError
    except (DualWriteError, KeyboardInterrupt, ValueError) as raised:
        seen = raised
    else:
        seen = None
    known = state in {WriteState.COMPLETED, WriteState.ABORTED}
    # Where the outcome is known the writer goes on, after an abort of its own; else the next one aborts.
    told = {None: type(None), KeyboardInterrupt: KeyboardInterrupt}.get(error, error)
    if place in {"first part", "later part"} and issubclass(told, DualWriteError):
        told = TransactionAborted  # of a unit that is not ended
    assert type(seen) is (told if place != "abort" else KeyboardInterrupt if told is KeyboardInterrupt else ValueError)
    assert (one.state is UnitWriterState.BROKEN) == (not known)
    servers.fate = "commits"
    unit_writer().open()
    assert follow(servers.log) == ({"a", "b"} if seen is None or (kept and place in {"end", "whole"}) else set())


@pytest.mark.parametrize("goes_on", [False, True], ids=["leaves the block", "continues"])
def test_after_an_interruption_at_any_line_readers_see_whole_units(monkeypatch, goes_on):
    for line in itertools.count(1):
        with monkeypatch.context() as patch:
            servers = Servers(patch)
            one = unit_writer(2)
            one.open()
            interruption = Interruption(line)
            with suppress(KeyboardInterrupt, DualWriteError), interruption.armed(), one.unit() as unit:
                for number in range(5):
                    with suppress(KeyboardInterrupt) if goes_on else nullcontext():
                        unit.produce(b"1", b"%d" % number)
            try:
                with one.unit() as unit:
                    unit.produce(b"2", b"last")
            except IllegalStateError:  # it does not know where it stands
                one = unit_writer()
                one.open()
                with one.unit() as unit:
                    unit.produce(b"2", b"last")
            found = Counter(seen_in(servers.log))
            assert max(found.values()) == 1, interruption.at
            assert goes_on or found.keys() in ({"last"}, {*"01234", "last"}), interruption.at
            if interruption.at is None:
                return


def seen_in(log):
    """The keys of what readers see, in the order of the log."""
    shown, held = [], []
    image = SimpleNamespace(
        apply=lambda record: held.append(record.key.decode()),
        publish=lambda: (shown.extend(held), held.clear()),
        revert=held.clear,
    )
    follower = Follower(image)
    for offset, record in enumerate(log):
        follower.read(offset, record)
    return shown


def test_an_error_of_any_text_aborts_its_unit_and_the_writer_goes_on(servers):
    writer = unit_writer(1)
    writer.open()
    with pytest.raises(ValueError, match="bad"), writer.unit() as unit:
        unit.produce(b"1", b"a")
        unit.produce(b"1", b"b")
        raise ValueError("bad \udcff")
    assert writer.state is UnitWriterState.BETWEEN
    assert follow(servers.log) == set()


def test_a_broken_writer_says_what_to_do(servers):
    one = unit_writer(1)
    one.open()
    with pytest.raises(TransactionAborted, match="open another writer, which aborts the unit"), one.unit() as unit:
        servers.fate = "doubt, committed"
        unit.produce(b"v", b"a")
    with pytest.raises(IllegalStateError, match=r"writer of units is broken.*open a new writer"), one.unit():
        pass


def test_a_unit_is_written_in_parts_of_the_size_that_was_asked_for(servers):
    one = unit_writer(3)
    one.open()
    with one.unit() as unit:
        for number in range(7):
            unit.produce(b"v", b"%d" % number)
            assert len(servers.log) == (0 if number < 2 else 4 if number < 5 else 7)
    assert [event_of(record.headers).value for record in servers.log] == ["begin", *["part"] * 7, "end"]


def test_a_part_is_full_by_its_bytes_too(servers, monkeypatch):
    monkeypatch.setattr(writer, "_LARGEST_PART", 100)
    one = unit_writer(1000)
    one.open()
    with one.unit() as unit:
        unit.produce(b"v" * 60, b"a")
        assert not servers.log
        unit.produce(b"v" * 60, b"b")
        assert len(servers.log) == 3
