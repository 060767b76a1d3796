"""Units of one partition on real servers: readers see them as a whole or not at all, wherever a writer dies."""

import itertools
import random
from contextlib import closing, suppress

import psutil
import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.forking import processes
from harness.interruption import Interruption
from harness.kafka_tools import dump_metadata
from harness.messages import consume
from harness.orders import Order, on_postgresql
from harness.page_examples import example, run_example
from harness.patience import PATIENCE_S
from harness.shared_servers import data_directory
from sqlalchemy import insert, select

from dualwrite import ConfigurationError, DualWriter, Fenced, TransactionAborted, Unavailable, failpoints
from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError
from dualwrite.failpoints import FailpointError
from dualwrite.units import BatchReader, KeyedImage, UnitReader, UnitWriter
from dualwrite.units.log import PartitionLogs
from dualwrite.units.records import HEADER, AbortTransaction, UnitState, UnitWriterState, decoded
from dualwrite.units.writer import Written, announce_batch

pytestmark = on_postgresql

STEP = 211
"""A reader is left at each of this many lines, beginning with a random one of the first."""


@pytest.fixture
def writing(kafka, url, dualwrite_topic):
    """Opens writers of the topic's partition 0 with parts of two records."""

    def make(**settings):
        return UnitWriter(dualwrite_topic, kafka=kafka, database=url, **{"part_records": 2, **settings})

    return make


@pytest.fixture
def reader(kafka, dualwrite_topic):
    with UnitReader(dualwrite_topic, kafka=kafka, image=KeyedImage()) as reader:
        yield reader


def shown(reader):
    reader.catch_up()
    return {key.decode(): value.decode() for key, value in reader.snapshot().contents.items()}


def seen(reader, expected):
    """Whether the reader shows this, at the latest a moment after its commit: Kafka answers before it has written the markers."""
    deadline = Deadline(PATIENCE_S)
    while shown(reader) != expected and not deadline.expired:
        pass
    assert shown(reader) == expected
    return True


def put(unit, **values):
    for key, value in values.items():
        unit.produce(value.encode(), key.encode())


def markers(kafka, topic):
    """The markers of the topic as any consumer finds them."""
    found = []
    for message in consume(kafka, topic):
        [(_, word)] = message.headers()
        if word != b"part":
            assert message.key() is None
            found.append(decoded(message.value()))
    return found


def test_a_unit_of_many_transactions_is_seen_at_its_end_and_not_before(writing, reader):
    with writing() as writer:
        with writer.unit("first") as unit:
            put(unit, a="1", b="1")
        with writer.unit("second") as unit:
            put(unit, a="2", b="2", c="2", d="2", e="2")
            assert seen(reader, {"a": "1", "b": "1"})
            assert reader.snapshot().position is not None
        assert seen(reader, {"a": "2", "b": "2", "c": "2", "d": "2", "e": "2"})
        assert unit.records == 5


@pytest.mark.parametrize("size", [1, 7], ids=["nothing of it written", "parts of it written"])
def test_a_block_that_raises_leaves_nothing_to_see_and_the_writer_goes_on(
    writing, reader, kafka, dualwrite_topic, size
):
    with writing() as writer:
        with pytest.raises(ValueError, match="no"), writer.unit("torn") as unit:
            put(unit, **{f"k{number}": "1" for number in range(size)})
            raise ValueError("no")
        assert writer.state is UnitWriterState.BETWEEN
        with writer.unit() as unit:
            put(unit, a="1")
    assert seen(reader, {"a": "1"})
    assert [one for one in markers(kafka, dualwrite_topic) if isinstance(one, AbortTransaction)] == (
        [AbortTransaction("ValueError: no")] if size > 1 else []
    )


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_the_rows_of_a_unit_commit_if_and_only_if_it_ends(writing, reader, engine, orders, error):
    def work(tx):
        tx.connection.execute(insert(orders).values(id=1))
        if error is not None:
            raise error

    with writing() as writer, suppress(ValueError), writer.unit(at_end=work) as unit:
        put(unit, a="1", b="1", c="1")
    with engine.connect() as connection:
        found = connection.execute(select(Order.id)).scalars().all()
    assert (found, len(shown(reader))) == (([], 0) if error else ([1], 3))


def test_a_second_writer_fences_the_first_whose_unit_is_aborted(writing, reader, kafka, dualwrite_topic):
    with writing() as former:
        with pytest.raises(Fenced), former.unit("former") as unit:
            put(unit, a="former", b="former", c="former")
            with writing() as latter:
                with latter.unit() as own:
                    put(own, a="latter")
                put(unit, d="former", e="former", f="former")
        assert seen(reader, {"a": "latter"})
        with pytest.raises((Fenced, IllegalStateError)), former.unit() as unit:
            put(unit, a="former again")
    assert seen(reader, {"a": "latter"})
    assert AbortTransaction("its writer ended before the unit") in markers(kafka, dualwrite_topic)


def test_a_reader_that_continues_from_a_snapshot_reads_an_unfinished_unit_again(
    writing, reader, kafka, dualwrite_topic
):
    with writing() as writer:
        with writer.unit() as unit:
            put(unit, a="1")
        with writer.unit() as unit:
            put(unit, a="2", b="2", c="2")
            reader.catch_up()
            taken = reader.snapshot()
        assert taken.contents == {b"a": b"1"}
        again = UnitReader(dualwrite_topic, kafka=kafka, image=KeyedImage(taken.contents), position=taken.position)
        with closing(again):
            assert seen(again, {"a": "2", "b": "2", "c": "2"})


def test_a_reader_that_an_exception_has_left_goes_on_with_whole_units_or_refuses(writing, kafka, dualwrite_topic):
    with writing(part_records=5) as writer:
        for value in "123":
            with writer.unit() as unit:
                put(unit, **{f"k{number}": value for number in range(12)})
            with suppress(ValueError), writer.unit() as unit:
                put(unit, **{f"k{number}": "no" for number in range(7)})
                raise ValueError
    whole = {f"k{number}".encode(): b"3" for number in range(12)}
    for line in itertools.count(random.randrange(1, STEP + 1), STEP):
        interruption = Interruption(line)
        image = KeyedImage()
        with UnitReader(dualwrite_topic, kafka=kafka, image=image) as reader:
            with suppress(KeyboardInterrupt), interruption.armed():
                reader.catch_up()
            assert len(set(image.contents().values())) <= 1, interruption.at
            try:
                while image.contents() != whole:
                    reader.catch_up()
                    assert len(set(image.contents().values())) <= 1, interruption.at
            except IllegalStateError as refused:
                assert "open another reader" in str(refused)  # noqa: PT017 - it may also go on
        if interruption.at is None:
            return


def refuses(reader, why):
    """Whether the reader refuses to go on, and refuses again."""
    for _ in range(3):
        deadline = Deadline(PATIENCE_S)
        with pytest.raises(ConfigurationError, match=why):
            while not deadline.expired:
                reader.catch_up()
    return True


def test_a_reader_does_not_go_on_past_a_record_that_cannot_stand_there(writing, reader, kafka, dualwrite_topic):
    with writing() as writer:
        with pytest.raises(TypeError, match="to leave it"), writer.unit() as unit:
            put(unit, a="1", b="1", c="1")
            foreign = Producer(kafka)
            foreign.produce(dualwrite_topic, value=b"1", key=b"foreign", partition=0)
            foreign.flush()
            put(unit, d="1", e="1", f="1")
            raise TypeError("to leave it")
        with writer.unit() as unit:
            put(unit, a="2")
    assert refuses(reader, "holds 'record', which cannot stand there")
    assert reader.snapshot().contents == {}


def test_a_reader_inside_a_unit_whose_log_was_deleted_under_it_does_not_go_on(writing, reader, kafka, dualwrite_topic):
    admin = AdminClient(kafka)
    with writing() as former:
        with former.unit() as unit:
            put(unit, a="1")
        with pytest.raises(Fenced), former.unit() as unit:
            put(unit, a="2", b="2", c="2")
            seen(reader, {"a": "1"})
            taken = reader.snapshot()
            everything = [TopicPartition(dualwrite_topic, 0, OFFSET_END)]
            [deleted] = admin.delete_records(everything).values()
            deleted.result(PATIENCE_S)
            with writing() as writer, writer.unit() as new:
                put(new, a="3")
            put(unit, d="2", e="2", f="2")
    # Had it not read all of the begun unit, the rest of that is what is missing.
    assert refuses(
        reader, "If its records were deleted under the reader, open another|records to read next are deleted"
    )
    assert reader.snapshot().contents == taken.contents
    again = UnitReader(dualwrite_topic, kafka=kafka, image=KeyedImage(taken.contents), position=taken.position)
    with closing(again):
        assert refuses(again, "the records to read next are deleted.*begin again without a position")
    with UnitReader(dualwrite_topic, kafka=kafka, image=KeyedImage()) as another:
        assert seen(another, {"a": "3"})


def test_a_part_whose_messages_do_not_arrive_aborts_the_unit(writing, reader):
    with writing() as writer:
        with pytest.raises(TransactionAborted), writer.unit() as unit:
            put(unit, a="1", b="1")
            unit.produce(b"x" * 3_000_000, b"too large")
            put(unit, c="1")
        with writer.unit() as unit:
            put(unit, d="1")
    assert seen(reader, {"d": "1"})


def test_a_compacted_topic_is_refused_before_a_record_is_in_it(dualwrite_kafka, kafka, url, dualwrite_topic):
    topic = dualwrite_kafka.create_topic(f"{dualwrite_topic}-compacted", 1, config={"cleanup.policy": "compact"})
    with UnitWriter(topic, kafka=kafka, database=url, part_records=1) as writer:
        with pytest.raises(TransactionAborted), writer.unit() as unit:
            put(unit, a="1", b="1")
        with closing(PartitionLogs(kafka)) as logs:
            assert logs.last_event((topic, 0), Deadline(30)) is None


def test_misuse_is_refused_with_what_to_do(writing, kafka, url, dualwrite_topic):
    with (
        pytest.raises(ConfigurationError, match="has no partition 7"),
        UnitWriter(dualwrite_topic, 7, kafka=kafka, database=url),
    ):
        pass
    writer = writing()
    with pytest.raises(IllegalStateError), writer.unit():
        pass
    with writer:
        with writer.unit() as unit:
            with pytest.raises(IllegalStateError, match="cannot be nested"), writer.unit():
                pass
            with pytest.raises(ConfigurationError, match="own"):
                unit.produce(b"1", headers=[(HEADER, b"end")])
        with pytest.raises(IllegalStateError, match="has ended"):
            unit.produce(b"1")
        with pytest.raises(ConfigurationError, match="at most 255"), writer.unit("x" * 256):
            pass
        with writer.unit():
            pass


def die(kafka, url, topic, point):
    with UnitWriter(topic, kafka=kafka, database=url, part_records=2) as writer:
        with writer.unit("whole") as unit:
            put(unit, a="1", b="1", c="1")
        failpoints.arm(point)
        with writer.unit("dying") as unit:
            put(unit, a="2", b="2", c="2", d="2", e="2")
            if point.startswith(("unit.before_abort", "unit.aborted")):
                raise ValueError("no")


BEFORE = {"a": "1", "b": "1", "c": "1"}
AFTER = dict.fromkeys("abcde", "2")
KILLS = {
    "unit.part:1": BEFORE,
    "unit.ending:1": BEFORE,
    "write.prepared:2": BEFORE,
    "unit.ended:1": AFTER,
    "write.decided:2": BEFORE,
    "write.decided:3": AFTER,
    "unit.before_abort:1": BEFORE,
    "unit.aborted:1": BEFORE,
}
FEW = {"unit.part:1", "write.decided:3"}


@pytest.mark.parametrize(
    ("point", "expected"),
    [pytest.param(*one, marks=[] if one[0] in FEW else pytest.mark.thorough) for one in KILLS.items()],
)
def test_a_writer_that_is_killed_leaves_its_unit_whole_or_not_at_all(
    kafka, url, dualwrite_topic, writing, reader, point, expected
):
    dying = processes().Process(target=die, args=(kafka, url, dualwrite_topic, point))
    dying.start()
    dying.join()
    assert dying.exitcode == -9
    assert shown(reader) in ([BEFORE, AFTER] if point == "write.decided:3" else [expected])
    with writing():
        assert seen(reader, expected)
        assert reader._follower.state is UnitState.OUTSIDE


@pytest.mark.parametrize("point", ["unit.found", "unit.before_abort"])
def test_a_writer_that_fails_while_it_aborts_what_another_left_leaves_it_to_the_next(
    kafka, url, dualwrite_topic, writing, reader, point
):
    dying = processes().Process(target=die, args=(kafka, url, dualwrite_topic, "unit.part:1"))
    dying.start()
    dying.join()
    failpoints.arm(f"{point}:1:raise")
    with pytest.raises(FailpointError), writing():
        pass
    failpoints.arm("")
    with writing() as writer, writer.unit() as unit:
        put(unit, a="3")
    assert seen(reader, {**BEFORE, "a": "3"})


def test_kafkas_own_decoder_reads_the_markers(writing, dualwrite_kafka, dualwrite_topic):
    with writing() as writer:
        with writer.unit("größe") as unit:
            unit.produce(b"\xff", b"a")
        with writer.unit():
            pass
        with suppress(ValueError), writer.unit() as unit:
            put(unit, a="1", b="1")
            raise ValueError("no")
    directory = data_directory(dualwrite_kafka) / f"{dualwrite_topic}-0"
    [log] = directory.glob("*.log")
    found = [(one["type"], one["version"], one["data"]) for one in dump_metadata(log)]
    assert found == [
        ("BEGIN_TRANSACTION_RECORD", 0, {"name": "größe"}),
        ("END_TRANSACTION_RECORD", 0, {}),
        ("BEGIN_TRANSACTION_RECORD", 0, {}),
        ("END_TRANSACTION_RECORD", 0, {}),
        ("BEGIN_TRANSACTION_RECORD", 0, {}),
        ("ABORT_TRANSACTION_RECORD", 0, {"reason": "ValueError: no"}),
    ]


def test_the_pages_examples_run_as_they_stand(kafka, engine, dualwrite_topic):
    [writes] = example("units.md", "Write units")
    [reads] = example("units.md", "Read units")
    run_example(writes, dualwrite_topic, page_topic="articles", kafka=kafka, engine=engine)
    found = run_example(reads, dualwrite_topic, page_topic="articles", kafka=kafka)
    assert found["first"] == b"article 0"
    assert len(found["saved"].contents) == 25_000


class Sums:
    """An image of one number for each of a thousand keys."""

    def __init__(self):
        self.shown = [0] * 1000
        self.change = {}

    def apply(self, record):
        number = int(record.key) % 1000
        self.change[number] = self.change.get(number, 0) + len(record.value)

    def publish(self):
        for number, sum_ in self.change.items():
            self.shown[number] += sum_
        self.change = {}

    def revert(self):
        self.change = {}

    def contents(self):
        return list(self.shown)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_unit_of_a_million_records_needs_the_memory_of_its_image(writing, kafka, dualwrite_topic):
    with writing(part_records=10_000) as writer, writer.unit("large") as unit:
        for number in range(1_000_000):
            unit.produce(b"v" * 300, b"%d" % number)
    before = psutil.Process().memory_info().rss
    with UnitReader(dualwrite_topic, kafka=kafka, image=Sums()) as reader:
        most = 0
        while not any(reader.snapshot().contents):
            reader.poll()
            most = max(most, psutil.Process().memory_info().rss - before)
        assert reader.snapshot().contents == [300_000] * 1000
    assert most < 100_000_000  # a third of what was read


@pytest.mark.parametrize("decisions", [lambda: 1, itertools.count().__next__], ids=["alone", "with others"])
def test_a_batch_is_announced_unless_another_one_was_written_meanwhile(
    dualwrite_kafka, kafka, engine, dualwrite_topic, decisions
):
    unit_topic = dualwrite_kafka.create_topic(f"{dualwrite_topic}-units", 1)
    with DualWriter("orders", kafka=kafka, database=engine) as writer, writer.transaction() as tx:
        tx.produce(dualwrite_topic, "1")

    def announce():
        return announce_batch(
            "a", dualwrite_topic, unit_topic=unit_topic, kafka=kafka, database=engine, schema=None, timeout_s=PATIENCE_S,
            written=lambda: Written("a", decisions()),
        )  # fmt: skip

    with BatchReader(unit_topic, kafka=kafka) as reader:
        if decisions() != decisions():
            with pytest.raises(Unavailable, match="another batch was written"):
                announce()
            assert reader.next_batch(1.0) is None
        else:
            assert announce() is True
            assert announce() is False
            batch = reader.next_batch(PATIENCE_S)
            assert [record.value for record in batch.records()] == [b"1"]
            with DualWriter("orders", kafka=kafka, database=engine) as writer, writer.transaction() as tx:
                tx.produce(dualwrite_topic, "of nobody")
            with pytest.raises(ConfigurationError, match="batch 'a' has its unit in"):
                announce()
            assert reader.next_batch(0.5) is None
