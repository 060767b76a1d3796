"""State tasks on a real broker: killed anywhere, the store equals what Kafka has committed of its changelog."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from harness.counting import TABLE
from harness.page_examples import example, run_example
from harness.patience import wait_until
from harness.places import PROOF
from sqlalchemy import create_engine, text

from dualwrite import ConfigurationError, DualWriter, TransactionalProducer, Unavailable, failpoints
from dualwrite.errors import ChangelogDiffers, IllegalStateError, StoreTooOld
from dualwrite.failpoints import FailpointError
from dualwrite.state import KeyValueStore, ProducerBlocks, Standby, StateTask
from dualwrite.testing import read_committed

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

KEYS = ["UA", "AA", "DL", "B6"]
IN_MEMORY, SPILLED = 1 << 20, 0


@pytest.fixture
def make_changelog(dualwrite_kafka):
    made = []

    def make(*, partitions=1, **config):
        name = f"changelog-{secrets.token_hex(4)}"
        made.append(name)
        return dualwrite_kafka.create_topic(name, partitions, config={"cleanup.policy": "compact", **config})

    yield make
    for name in made:
        dualwrite_kafka.delete_topic(name)


@pytest.fixture
def changelog(make_changelog):
    return make_changelog()


@pytest.fixture
def task_on(kafka, kafka_id):
    """Opens a store and a task over it, with a producer of the same id, so that each fences the former."""

    @contextmanager
    def opened(directory, changelog, **more):
        with TransactionalProducer(kafka, kafka_id) as producer, KeyValueStore(directory) as store:
            producer.init_transactions()
            yield StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=changelog, partition=0, **more)

    return opened


def write(task, **values):
    with task.transaction():
        for key, value in values.items():
            task.store.put(key.encode(), None if value is None else value.encode())


def everything(store):
    return {key.decode(): value.decode() for key, value in store.range()}


def replayed(kafka, changelog):
    """The state that the committed changelog makes."""
    state = {}
    for record in read_committed(kafka, changelog):
        state[record.key.decode()] = record.value
    return {key: value.decode() for key, value in state.items() if value is not None}


# A running count, killed

POINTS = ["state.logged", "state.before_commit", "state.decided", "state.copied", "state.finished", "state.committed"]
IN_EVERY_RUN = {
    ("state.before_commit", None),
    ("write.decided", "url"),
}


@pytest.mark.parametrize(
    ("point", "rows"),
    [
        pytest.param(point, rows, marks=() if (point, rows) in IN_EVERY_RUN else pytest.mark.thorough)
        for rows in (None, "url")
        for point in [*POINTS, *(["write.recorded", "write.decided"] if rows else [])]
    ],
)
def test_a_count_killed_in_the_middle_is_exact_at_the_end(
    request, tmp_path, kafka, kafka_id, dualwrite_topic, changelog, point, rows
):
    spills = point in {"state.decided", "state.copied", "state.finished"}
    job = {
        "kafka": dict(kafka), "id": kafka_id, "input": dualwrite_topic, "output": dualwrite_topic + "-counts", "changelog": changelog,
        "directory": str(tmp_path / "store"), "memory": SPILLED if spills else IN_MEMORY, "end": 40,
    }  # fmt: skip
    if rows:
        job["url"] = request.getfixturevalue("migrated_database")
        engine = create_engine(job["url"])
        with engine.begin() as connection:
            connection.execute(text(TABLE))
    request.getfixturevalue("dualwrite_kafka").create_topic(job["output"], 1)
    keys = [KEYS[number * number % len(KEYS)] for number in range(40)]
    producer = Producer(kafka)
    for key in keys:
        producer.produce(dualwrite_topic, key=key, value=b"", partition=0)
    producer.flush()
    (tmp_path / "job.json").write_text(json.dumps(job))

    def run(failpoint=""):
        return subprocess.run(
            [sys.executable, "-m", "harness.counting", tmp_path / "job.json"],
            cwd=PROOF, env={**os.environ, "DUALWRITE_FAILPOINT": failpoint}, check=False,
        ).returncode  # fmt: skip

    nth = 1 if point == "state.copied" else 4
    assert run(f"{point}:{nth}") == (0 if point == "state.copied" else -signal.SIGKILL)
    assert run("state.restored" if point == "state.before_commit" else "") in {0, -signal.SIGKILL}
    assert run() == 0
    counts = Counter(keys)
    with KeyValueStore(tmp_path / "store") as store:
        assert everything(store) == replayed(kafka, changelog) == {key: str(count) for key, count in counts.items()}
    published = [(record.key.decode(), int(record.value)) for record in read_committed(kafka, job["output"])]
    assert published == [(key, keys[: at + 1].count(key)) for at, key in enumerate(keys)]
    if rows:
        with engine.connect() as connection:
            assert {tuple(row) for row in connection.execute(text("SELECT key, number FROM counted"))} == set(published)
        engine.dispose()


# One block


def test_a_block_commits_the_store_with_its_changelog(tmp_path, kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1", b="2")
        assert not task.behind
        write(task, a=None, c="3")
        assert not task.behind
        assert everything(task.store) == replayed(kafka, changelog) == {"b": "2", "c": "3"}
        assert task.store.committed.offset == 2 + 1 + 2


def test_a_block_that_raises_leaves_nothing(tmp_path, kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
        with pytest.raises(ZeroDivisionError), task.transaction():
            task.store.put(b"a", b"2")
            raise ZeroDivisionError
        assert everything(task.store) == {"a": "1"}
        assert task.behind
        write(task, b="2")
        assert everything(task.store) == replayed(kafka, changelog) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("point", ["state.logged", "state.before_commit", "state.committed"])
def test_after_a_failure_the_next_block_begins_with_what_kafka_has_committed(
    tmp_path, kafka, task_on, changelog, point
):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
        failpoints.arm(f"{point}:1:raise")
        # The transaction stands, whatever becomes of the store's commit: its work must not run again.
        with nullcontext() if point == "state.committed" else pytest.raises(FailpointError):
            write(task, a="2")
        failpoints.arm("")
        assert task.behind
        with task.transaction():
            assert task.store.get(b"a") == (b"1" if point == "state.logged" else b"2")
        assert everything(task.store) == replayed(kafka, changelog)


def test_blocks_without_changes_and_with_writes_outside(tmp_path, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task)
        assert not task.behind
        with pytest.raises(IllegalStateError, match="in use"), task.transaction():
            task.restore()
        write(task, a="1")
        task.store.put(b"b", b"2")
        with pytest.raises(IllegalStateError, match="outside of a block"):
            write(task, c="3")
        assert task.restore() == 0
        assert everything(task.store) == {"a": "1"}


def test_a_writers_serializers_leave_the_changelog_alone(tmp_path, kafka, migrated_database, changelog):
    def refuse(value, _):
        raise AssertionError(value)

    writer = DualWriter("count", kafka=kafka, database=migrated_database, serializers={"key": refuse, "value": refuse})
    with writer, KeyValueStore(tmp_path / "store") as store:
        task = StateTask(writer, store, kafka=kafka, changelog=changelog, partition=0)
        write(task, a="\x00\x01")
    assert replayed(kafka, changelog) == {"a": "\x00\x01"}


def test_a_writer_in_bulk_mode_is_refused(tmp_path, kafka, migrated_database, changelog):
    with (
        DualWriter("count", kafka={**kafka, "dualwrite.bulk": True}, database=migrated_database) as writer,
        KeyValueStore(tmp_path / "store") as store,
    ):
        task = StateTask(writer, store, kafka=kafka, changelog=changelog, partition=0)
        with pytest.raises(IllegalStateError, match="bulk mode"):
            write(task, a="1")
    assert replayed(kafka, changelog) == {}


@pytest.mark.parametrize("outbox", ["fallback", "always"])
def test_a_writer_whose_changelog_records_may_wait_is_refused(tmp_path, kafka, migrated_database, changelog, outbox):
    """The next block would begin with what the changelog has, without them: a count of ten would be less than ten."""
    with (
        DualWriter("count", kafka=kafka, database=migrated_database, outbox=outbox) as writer,
        KeyValueStore(tmp_path / "store") as store,
    ):
        task = StateTask(writer, store, kafka=kafka, changelog=changelog, partition=0)
        with pytest.raises(ConfigurationError, match="may wait in the database"), task.transaction():
            raise AssertionError("the block has begun")
    assert replayed(kafka, changelog) == {}


# Stores and changelogs that moved apart


def test_an_old_copy_of_the_directory_is_rolled_forward(tmp_path, kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1", gone="1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="2", gone=None)
    with task_on(tmp_path / "copy", changelog) as task:
        assert task.restore() == 2
        assert everything(task.store) == replayed(kafka, changelog) == {"a": "2"}
        assert task.restore() == 0


def test_an_empty_directory_is_built_from_the_whole_changelog_and_a_kill_loses_no_progress(
    tmp_path, task_on, changelog
):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, **{f"k{number}": "1" for number in range(100)})
    seen = []
    with task_on(tmp_path / "other", changelog) as task:
        failpoints.arm("state.restored:1:raise")
        with pytest.raises(FailpointError):
            task.restore()
        failpoints.arm("")
        reached = task.store.committed.offset
        assert task.restore(lambda *progress: seen.append(progress)) == max(0, 100 - reached)
        assert len(everything(task.store)) == 100


def test_a_compacted_changelog_makes_the_same_state(tmp_path, mortal_kafka):
    kafka = mortal_kafka.client_config()
    at_once = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001", "max.compaction.lag.ms": "200"}
    name = f"changelog-{secrets.token_hex(4)}"
    mortal_kafka.create_topic(name, 1, {"cleanup.policy": "compact", **at_once})

    @contextmanager
    def opened(directory):
        with TransactionalProducer(kafka, name) as producer, KeyValueStore(tmp_path / directory) as store:
            producer.init_transactions()
            yield StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=name, partition=0)

    with opened("store") as task:
        write(task, a="1", b="1", gone="1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    expected = {"a": "1", "c": "1"}

    def compacted():
        expected["turn"] = str(int(expected.get("turn", 0)) + 1)
        with opened("store") as task:  # each turn rolls a segment: only what is older than the newest one is compacted
            write(task, b=None, gone=None, c="1", turn=expected["turn"])
        time.sleep(0.2)  # the age that segment.ms asks for
        return all(record.value != b"1" or record.key in {b"a", b"c"} for record in read_committed(kafka, name))

    wait_until(compacted)
    for directory in ("copy", "empty", "store"):
        with opened(directory) as task:
            task.restore()
            assert everything(task.store) == replayed(kafka, name) == expected


def test_a_changelog_that_ends_before_the_store_is_refused(tmp_path, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
        task.store.commit(1000)  # as a store is whose changelog was truncated
    with task_on(tmp_path / "store", changelog) as task:
        with pytest.raises(ChangelogDiffers, match="truncated, or has lost"):
            write(task, a="2")
        assert everything(task.store) == {"a": "1"}


def test_a_task_becomes_a_standby_at_once(tmp_path, kafka, task_on, changelog):
    """The marker of its last commit may be missing still: its store is not ahead of the changelog for that."""
    with task_on(tmp_path / "store", changelog) as task:
        standby = Standby(task.store, kafka=kafka, changelog=changelog, partition=0)
        for number in range(5):
            write(task, a=str(number))
            assert standby.catch_up() == 0
        assert everything(task.store) == {"a": "4"}


def applied(standby, count):
    """How many records it applies until it has applied so many: a commit is answered before its markers are written."""
    done = standby.catch_up()
    while done < count:
        done += standby.catch_up()
    return done


def test_a_standby_follows_and_takes_over(tmp_path, kafka, kafka_id, task_on, changelog):
    with KeyValueStore(tmp_path / "standby") as copy:
        standby = Standby(copy, kafka=kafka, changelog=changelog, partition=0)
        with task_on(tmp_path / "store", changelog) as task:
            write(task, a="1")
            assert applied(standby, 1) == 1
            write(task, a=None, b="2")
            with task.transaction() as tx:
                tx.produce(changelog, key=b"open", value=b"1", partition=0)
                assert applied(standby, 2) == 2
                assert everything(copy) == {"b": "2"}
    with task_on(tmp_path / "standby", changelog) as task:
        write(task, c="3")
        assert everything(task.store) == {"b": "2", "c": "3", "open": "1"}


def test_a_copy_of_all_partitions_follows_each_and_answers_for_all(tmp_path, kafka, kafka_id, make_changelog):
    """What a service reads of a group whose members have the partitions; a partition that is added later, too."""
    changelog = make_changelog(partitions=2)
    with TransactionalProducer(kafka, kafka_id) as producer, KeyValueStore(tmp_path / "copy") as copy:
        producer.init_transactions()
        reader = copy.reader()

        def commit(*records):
            with ProducerBlocks(producer).transaction() as tx:
                for key, value, partition in records:
                    tx.produce(changelog, key=key, value=value, partition=partition)

        def catch_up(count):
            return applied(Standby(copy, kafka=kafka, changelog=changelog, partition=None), count)

        commit((b"a", b"1", 0), (b"b", b"1", 1), (b"c", b"1", 1))
        assert catch_up(3) == 3
        first = reader.snapshot()
        commit((b"b", None, 1), (b"a", b"2", 0))
        commit((b"d", b"1", 1))
        assert catch_up(3) == 3
        assert dict(first.range()) == {b"a": b"1", b"b": b"1", b"c": b"1"}
        assert dict(reader.range()) == {b"a": b"2", b"c": b"1", b"d": b"1"}
        # Each transaction's marker takes an offset, too.
        assert [first.committed.offset_of(number) for number in (0, 1)] == [2, 3]
        assert [reader.committed.offset_of(number) for number in (0, 1)] == [4, 7]
        admin = AdminClient(kafka)
        admin.create_partitions([NewPartitions(changelog, 3)])[changelog].result(30)
        wait_until(lambda: len(admin.list_topics(changelog, 30).topics[changelog].partitions) == 3)
        commit((b"e", b"1", 2))
        assert catch_up(1) == 1
        assert reader.get(b"e").committed.offset_of(2) == 2
    with KeyValueStore(tmp_path / "copy") as copy:
        with pytest.raises(ChangelogDiffers, match="is another topic or partition"):
            Standby(copy, kafka=kafka, changelog=changelog, partition=0).catch_up()
        assert Standby(copy, kafka=kafka, changelog=changelog, partition=None).catch_up() == 0


def test_a_restore_waits_for_an_open_transaction(tmp_path, kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog, timeout_s=1.0) as task:
        with TransactionalProducer(kafka, f"other-{changelog}") as other:
            other.init_transactions()
            other.begin_transaction()
            other.produce(changelog, key=b"a", value=b"1", partition=0)
            other.prepare_transaction()
            with pytest.raises(Unavailable, match="transaction stays open"):
                task.restore()
            other.commit_transaction()
        assert task.restore() == 1


def test_a_changelog_made_again_is_refused(tmp_path, dualwrite_kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
    dualwrite_kafka.delete_topic(changelog)
    dualwrite_kafka.create_topic(changelog, 1, config={"cleanup.policy": "compact"})
    with task_on(tmp_path / "store", changelog) as task:
        with pytest.raises(ChangelogDiffers, match="it is another topic or partition"):
            write(task, a="2")
        assert everything(task.store) == {"a": "1"}


def test_a_changelog_without_the_records_that_the_store_needs_is_refused(tmp_path, kafka, make_changelog, task_on):
    changelog = make_changelog(**{"cleanup.policy": "compact,delete", "retention.ms": "-1"})
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with task_on(tmp_path / "store", changelog) as task:
        write(task, b="1")
        write(task, c="1")
        end = task.store.committed.offset
    admin, where = AdminClient(dict(kafka)), TopicPartition(changelog, 0, end)
    admin.delete_records([where])[where].result(30)
    for directory in ("copy", "empty"):
        with task_on(tmp_path / directory, changelog) as task:
            with pytest.raises(ChangelogDiffers, match="were deleted"):
                task.restore()
            assert everything(task.store) == ({"a": "1"} if directory == "copy" else {})
    with task_on(tmp_path / "store", changelog) as task:
        assert task.restore() == 0


def test_a_copy_older_than_the_changelogs_deletions_is_refused(tmp_path, make_changelog, task_on):
    changelog = make_changelog(**{"delete.retention.ms": "1"})
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with task_on(tmp_path / "store", changelog) as task:
        assert task.restore() == 0  # nothing follows but the commit's own marker
        write(task, a=None)
    with task_on(tmp_path / "copy", changelog) as task:
        with pytest.raises(StoreTooOld, match="it may have lost some that the store has not seen"):
            task.restore()
        assert everything(task.store) == {"a": "1"}


def test_a_store_that_is_too_old_is_built_again_where_that_is_asked_for(tmp_path, kafka, kafka_id, make_changelog):
    changelog = make_changelog(**{"delete.retention.ms": "1"})

    @contextmanager
    def opened(directory):
        with TransactionalProducer(kafka, kafka_id) as producer:
            producer.init_transactions()
            with KeyValueStore(tmp_path / directory, rebuild_if_too_old=True) as store:
                yield StateTask(ProducerBlocks(producer), store, kafka=kafka, changelog=changelog, partition=0)

    with opened("store") as task:
        write(task, a="1", gone="1")
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    with opened("store") as task:
        write(task, a="2", gone=None)
    with opened("copy") as task:
        assert task.restore() == 4  # the whole changelog, not the two records that follow
        assert everything(task.store) == replayed(kafka, changelog) == {"a": "2"}
        write(task, b="1")
        assert everything(task.store) == replayed(kafka, changelog)
    with opened("copy") as task:
        assert task.restore() == 0


def abort_records(kafka, changelog, count):
    """Transactions of one record that are aborted: each takes two offsets."""
    with TransactionalProducer(kafka, f"other-{changelog}") as other:
        other.init_transactions()
        for _ in range(count):
            other.begin_transaction()
            other.produce(changelog, key=b"a", value=b"aborted", partition=0)
            other.prepare_transaction()
            other.abort_transaction()


@pytest.mark.parametrize("directory", ["store", "empty"])
def test_a_changelog_that_ends_in_markers_alone_is_read_to_its_end(tmp_path, kafka, task_on, changelog, directory):
    """Nothing that a consumer shows has the last offsets: those of aborted records, and of control records."""
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
    abort_records(kafka, changelog, 3)
    with task_on(tmp_path / directory, changelog) as task:
        assert task.restore() == (0 if directory == "store" else 1)
        assert task.store.committed.offset == 1 + 1 + 3 * 2
        assert everything(task.store) == {"a": "1"}
        assert task.restore() == 0


def test_a_changelog_without_records_and_with_a_high_end_is_read_to_its_end(tmp_path, kafka, task_on, changelog):
    abort_records(kafka, changelog, 5)
    with task_on(tmp_path / "store", changelog) as task:
        assert task.restore() == 0
        assert task.store.committed.offset == 10
        write(task, a="1")
        assert task.store.committed.offset == 11
    with task_on(tmp_path / "other", changelog) as task:
        assert task.restore() == 1
        assert everything(task.store) == {"a": "1"}


def test_other_threads_read_what_the_changelog_has_up_to_the_offset_of_the_answer(tmp_path, kafka, task_on, changelog):
    with task_on(tmp_path / "store", changelog) as task:
        reader = task.store.reader()
        write(task, a="1", b="1")
        with reader.snapshot() as snapshot, task.transaction():
            task.store.put(b"a", b"2")
            assert reader.get(b"a") == (b"1", snapshot.committed)
            assert task.store.reader("read_uncommitted").get(b"a").value == b"2"
        assert reader.get(b"a").value == b"2"
        for seen in (snapshot.committed, reader.committed):
            below = [r for r in read_committed(kafka, changelog) if r.offset < seen.offset]
            assert {r.key: r.value for r in below} == {b"a": b"1" if seen is snapshot.committed else b"2", b"b": b"1"}


def test_a_block_is_told_when_it_should_end(tmp_path, kafka, task_on, changelog):
    blocks, keys = [], iter(range(100))
    with task_on(tmp_path / "store", changelog, max_uncommitted_bytes=50_000) as task:
        assert not task.commit_is_due
        while sum(blocks) < 100:
            with task.transaction():
                blocks.append(0)
                for key in keys:
                    task.store.put(b"%d" % key, bytes(5_000))
                    blocks[-1] += 1
                    if task.commit_is_due:
                        break
            assert not task.commit_is_due
    assert blocks == [10] * 10


def begin_nested(tx):
    return tx.connection.begin_nested()


def session_begin_nested(tx):
    return tx.session.begin_nested()


@contextmanager
def as_text(tx):
    tx.connection.execute(text("SAVEPOINT mine"))
    try:
        yield
    except BaseException:
        tx.connection.execute(text("ROLLBACK TO SAVEPOINT mine"))
        raise
    finally:
        tx.connection.execute(text("RELEASE SAVEPOINT mine"))


@pytest.mark.parametrize("savepoint", [begin_nested, session_begin_nested, as_text])
def test_a_store_is_not_written_inside_a_savepoint_which_could_not_take_it_back(
    tmp_path, kafka, migrated_database, kafka_id, dualwrite_topic, changelog, savepoint
):
    with (
        DualWriter(kafka_id, kafka=kafka, database=migrated_database) as writer,
        KeyValueStore(tmp_path / "store") as store,
    ):
        task = StateTask(writer, store, kafka=kafka, changelog=changelog, partition=0)
        with task.transaction() as tx:
            store.put(b"before", b"1")
            with (
                pytest.raises(IllegalStateError, match="inside a savepoint.*before the savepoint, or after"),
                savepoint(tx),
            ):
                assert store.get(b"before") == b"1"
                tx.produce(dualwrite_topic, "inside")
                store.put(b"inside", b"1")
            with savepoint(tx):
                tx.produce(dualwrite_topic, "released")
            store.put(b"after", b"1")
        assert everything(store) == replayed(kafka, changelog) == {"before": "1", "after": "1"}
        store.put(b"outside", b"1")  # of no block: no savepoint of a former one counts
    assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"released"]


DAYS_AGO_MS = 2 * 86_400_000
"""More than the changelog keeps its deletions for."""


def days_ago():
    return int(time.time() * 1000) - DAYS_AGO_MS


def test_a_store_that_nobody_wrote_for_days_survives_one_abort(tmp_path, changelog, task_on):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
        task.store.commit(None, as_of_ms=days_ago())  # the last block was long ago
        failpoints.arm("state.logged:1:raise")
        with pytest.raises(FailpointError):
            write(task, a="2")
        failpoints.arm("")
        write(task, b="2")
        assert everything(task.store) == {"a": "1", "b": "2"}


def test_a_store_that_nobody_wrote_for_days_survives_a_crash_in_its_next_block(tmp_path, changelog, task_on):
    with task_on(tmp_path / "store", changelog) as task:
        write(task, a="1")
        task.store.commit(None, as_of_ms=days_ago())
        failpoints.arm("state.before_commit:1:raise")
        with pytest.raises(FailpointError):
            write(task, a="2")
        failpoints.arm("")
        shutil.copytree(tmp_path / "store", tmp_path / "as it died")
    with task_on(tmp_path / "as it died", changelog) as task:
        assert task.restore() == 1
        assert everything(task.store) == {"a": "2"}


def test_a_store_is_refused_if_another_one_wrote_its_changelog_days_ago(tmp_path, kafka, changelog, task_on):
    def produce(key, age_ms):
        other.produce(changelog, key=key, value=b"1", partition=0, timestamp=int(time.time() * 1000) - age_ms)
        other.flush()

    other = Producer(kafka)
    produce(b"a", DAYS_AGO_MS + 2000)
    with task_on(tmp_path / "store", changelog) as task:
        assert task.restore() == 1
        task.store.commit(None, as_of_ms=days_ago() - 1000)
    for age_ms in (DAYS_AGO_MS, DAYS_AGO_MS - 1000, 0):
        produce(b"b", age_ms)
    with task_on(tmp_path / "store", changelog) as task, pytest.raises(StoreTooOld, match="may have lost some"):
        task.restore()


@pytest.mark.parametrize("config", [{"cleanup.policy": "delete"}, {"cleanup.policy": "compact,delete"}])
def test_a_changelog_that_deletes_records_is_refused(tmp_path, make_changelog, task_on, config):
    with (
        task_on(tmp_path / "store", make_changelog(**config)) as task,
        pytest.raises(ConfigurationError, match="loses records"),
    ):
        task.restore()


def test_a_changelog_that_is_not_there_is_refused(tmp_path, task_on):
    with (
        task_on(tmp_path / "store", "nowhere") as task,
        pytest.raises(ConfigurationError, match="cannot be read.*create the topic"),
    ):
        task.restore()


# The page's examples


def test_the_pages_task_and_its_copy_of_all_partitions(
    kafka, migrated_database, make_changelog, dualwrite_topic, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    changelog = make_changelog(partitions=3)
    task, copy = (code.replace('"counts-changelog"', repr(changelog)) for code in example("state-stores.md", "A task"))
    message = SimpleNamespace(key=lambda: b"UA")
    engine = create_engine(migrated_database)
    with closing(Consumer({**kafka, "group.id": f"counts-{secrets.token_hex(4)}"})) as consumer:
        run_example(
            task, dualwrite_topic, page_topic="counts", kafka=kafka, engine=engine, consumer=consumer,
            batches=[[message, message], [message]], next_offsets=lambda messages: [TopicPartition(dualwrite_topic, 1, len(messages))],
        )  # fmt: skip
    engine.dispose()
    assert [record.value for record in read_committed(kafka, dualwrite_topic)] == [b"1", b"2", b"3"]
    run_example(copy, dualwrite_topic, kafka=kafka, KeyValueStore=KeyValueStore, Standby=Standby)
    assert capsys.readouterr().out == "b'3' contains partition 2 up to 0\n"


def test_the_pages_windows(task_on, changelog, tmp_path):
    [code] = example("state-stores.md", "Timestamps and windows")
    now_ms = time.time_ns() // 1_000_000
    start_ms = now_ms - now_ms % 3_600_000
    with task_on(tmp_path / "store", changelog) as task:
        names = run_example(code, "", store=task.store, task=task, start_ms=start_ms, now_ms=now_ms)
        assert names["hours"].get(b"UA", start_ms) == b"17"
