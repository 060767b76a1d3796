"""The job of the state stores' part: a running count that is compared with three other sources as soon as it is restored.

A message counts its key, or deletes the count: its number says which. So the state after any number of messages is known, and
must be that of the store, of a replay of the changelog's committed records, and of the offset that the group has committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import rocksdict  # noqa: F401 - imported once, before the processes are forked
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from harness.counting import committed_offset
from harness.worker import FENCED, LOST, OPERATIONS, UNAVAILABLE, OnPurpose
from sqlalchemy import Engine, select

import dualwrite.state.changelog
import dualwrite.state.store
from dualwrite import CompletionPending, DualWriter, Fenced, TransactionAborted, TransactionalProducer, Unavailable
from dualwrite.state import KeyValueStore, ProducerBlocks, StateTask
from dualwrite.testing import read_committed

KEYS = 31
AT_A_TIME = 20
COPIED_AT_ONCE_BYTES, READ_AT_ONCE = 100, 16
"""Small, so that a commit and a restore have several parts to die between."""


def key_of(number: int) -> str:
    """The key of a message."""
    return f"k{number * number % KEYS}"


def value_after(number: int, former: str | None) -> str | None:
    """The value of its key after a message; None where it deletes it."""
    return None if number % 11 == 5 else str(int(former or 0) + 1)


def states(end: int) -> Generator[tuple[str, str | None], None, None]:
    """For each of the first messages, its key and the key's value after it."""
    state: dict[str, str | None] = {}
    for number in range(end):
        key = key_of(number)
        state[key] = value_after(number, state.get(key))
        yield key, state[key]


def left_of(changes: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """The newest value of each key that is not deleted."""
    return {key: value for key, value in dict(changes).items() if value is not None}


def committed_before(kafka: Mapping[str, object], topic: str, end: int) -> dict[str, str]:
    """Replay the committed records before an offset that is stable, as a reader of its own. A transaction may be open after it."""
    settings = {
        **kafka,
        "group.id": topic,
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 20,
    }
    changes: list[tuple[str, str | None]] = []
    with closing(Consumer(settings)) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while True:
            message = consumer.poll(60)  # consume() would wait for as many messages as it is asked for
            assert message is not None, f"{topic} does not end"
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, str(error)
                return left_of(changes)
            if message.offset() < end:
                changes.append((message.key().decode(), message.value() and message.value().decode()))


def tally(job: dict, engine: Engine, tell: Callable[[str], None]) -> int:
    """Restore, compare, and count some blocks of messages."""
    dualwrite.state.store._COPIED_AT_ONCE_BYTES = COPIED_AT_ONCE_BYTES
    dualwrite.state.changelog._AT_ONCE = READ_AT_ONCE
    try:
        with _opened(job, engine) as (task, consumer):
            began = time.monotonic()
            applied = task.restore()
            tell(f"restored {time.monotonic() - began:.3f} {applied}")
            if wrong := _differences(job, task.store, at := committed_offset(consumer, job["input"])):
                tell(f"differs {wrong}")
                return LOST
            tell("compared")
            if job["blocks"] == 0:
                wrong = _outcome(job, engine, at)
                tell(f"differs {wrong}" if wrong else f"counted {at}")
                return LOST if wrong else 0
            _count(job, task, consumer, at)
    except Fenced:
        return FENCED
    except (Unavailable, TransactionAborted, CompletionPending):
        return UNAVAILABLE
    return 0


@contextmanager
def _opened(job: dict, engine: Engine) -> Generator[tuple[StateTask, Consumer], None, None]:
    with ExitStack() as later:
        if job["rows"]:
            blocks = later.enter_context(DualWriter(job["name"], kafka=job["kafka"], database=engine))
        else:
            producer = later.enter_context(TransactionalProducer(job["kafka"], job["name"]))
            producer.init_transactions()
            blocks = ProducerBlocks(producer)
        store = later.enter_context(KeyValueStore(job["directory"], max_memory_bytes=job["memory"]))
        consumer = later.enter_context(
            closing(
                Consumer(
                    {
                        **job["kafka"],
                        "group.id": job["name"],
                        "enable.auto.commit": False,
                        "isolation.level": "read_committed",
                    }
                )
            )
        )
        yield StateTask(blocks, store, kafka=job["kafka"], changelog=job["changelog"], partition=0), consumer


def _differences(job: dict, store: KeyValueStore, at: int) -> str:
    """Compare the store, the committed records of the changelog and the input up to the offset of the group."""
    found = {key.decode(): value.decode() for key, value in store.range()}
    records = read_committed(job["kafka"], job["changelog"])
    replayed = left_of([(one.key.decode(), one.value and one.value.decode()) for one in records])
    counted = left_of(list(states(at)))
    if found == replayed == counted:
        return ""
    return f"at {at}: the store {found}, the changelog {replayed}, the input {counted}".replace("\n", " ")


def _outcome(job: dict, engine: Engine, at: int) -> str:
    """Compare the input with the output messages, and with the rows if there are some."""
    expected = [(key, value or "") for key, value in states(at)]
    published = [(one.key.decode(), one.value.decode()) for one in read_committed(job["kafka"], job["output"])]
    if published != expected:
        return f"{len(published)} messages for {at} inputs, or other ones"
    if job["rows"]:
        prefix = f"{job['name']}:"
        with engine.connect() as connection:
            rows = set(connection.execute(select(OPERATIONS.c.id).where(OPERATIONS.c.id.startswith(prefix))).scalars())
        if rows != {f"{prefix}{number}" for number in range(at)}:
            return f"{len(rows)} rows for {at} inputs, or other ones"
    return ""


def _count(job: dict, task: StateTask, consumer: Consumer, at: int) -> None:
    consumer.assign([TopicPartition(job["input"], 0, at)])
    for block in range(job["blocks"]):
        messages = consumer.consume(AT_A_TIME, timeout=60)
        if job["fails_in"] == block:
            with suppress(OnPurpose):
                _block(job, task, consumer, messages, fails=True)
        _block(job, task, consumer, messages)


def _block(job: dict, task: StateTask, consumer: Consumer, messages: Sequence[Message], *, fails: bool = False) -> None:
    with task.transaction() as tx:
        for message in messages:
            key, number = message.key(), message.offset()
            former = task.store.get(key)
            value = value_after(number, former and former.decode())
            task.store.put(key, value and value.encode())
            tx.produce(job["output"], value=value or "", key=key, partition=0)
            if job["rows"]:
                tx.connection.execute(OPERATIONS.insert().values(id=f"{job['name']}:{number}"))
        if fails:
            raise OnPurpose
        after = TopicPartition(job["input"], 0, messages[-1].offset() + 1)
        tx.send_offsets_to_transaction([after], consumer.consumer_group_metadata())
