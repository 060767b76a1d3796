"""Units on a simulated Kafka and SQLite: each message is written once, whatever fails; only the work's failures count."""

import pytest
from sqlalchemy.exc import OperationalError

from dualwrite import CompletionPending, Fenced
from dualwrite.consumer import consumer
from dualwrite.consumer.consumer import dead_letter_headers
from dualwrite.consumer.partitions import PartitionLost
from dualwrite.errors import IllegalStateError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.protocol.findings import standby

from .members import LETTERS
from .messages import Read


def test_a_unit_writes_rows_messages_and_offsets(shop, member, put):
    found = member(put)
    assert found.perform(3) is False
    assert shop.both_have(0, 1, 2)
    assert found.offsets.to == {("input", 0): 3}
    assert found.working.counts.messages == 3


def test_an_outage_of_any_length_sets_nothing_aside(shop, member, put):
    errors = [
        Unavailable("no database"),
        standby(is_standby=True).as_error(),
        OperationalError("INSERT", {}, Exception("database is locked")),
        TransactionAborted("a deadlock"),
        LookupError("the user's own service"),
    ] * 5

    def handler(tx, messages):
        put(tx, messages)
        if errors:
            raise errors.pop()

    found = member(handler, dead_letter_topic=LETTERS, transient=(LookupError,))
    found.perform(2)
    assert shop.both_have(0, 1)
    assert found.working.counts.dead_letters == 0
    assert found.working.counts.failed_attempts == 25


def test_a_bad_message_is_set_aside_and_its_neighbours_are_written(shop, member, put):
    def handler(tx, messages):
        put(tx, messages)
        if any(message.offset() == 5 for message in messages):
            raise ValueError("five")

    found = member(handler, dead_letter_topic=LETTERS)
    found.perform(9)
    assert shop.rows == [str(number) for number in range(9) if number != 5]
    assert found.working.counts.dead_letters == 1
    assert found.offsets.to == {("input", 0): 9}


class Mute(Exception):
    """An error that fails when it is asked for its text."""

    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("a lone \udcff"), rb"a lone \udcff"),
        (ValueError("a \x00"), b"a \x00"),
        (ValueError("\ud83d" * 2000), rb"\ud83d" * 1000),
        (Mute(), b"(its text cannot be had: RuntimeError)"),
    ],
)
def test_any_text_may_be_an_errors(shop, member, put, error, reason):
    def handler(tx, messages):
        put(tx, messages)
        if any(message.offset() == 1 for message in messages):
            raise error

    found = member(handler, dead_letter_topic=LETTERS)
    found.perform(3)
    assert shop.rows == ["0", "2"]
    assert found.working.counts.dead_letters == 1
    headers = dict(dead_letter_headers(Read(1), error, attempts=1, group="g"))
    assert headers["dualwrite.dead_letter.reason"] == reason


def test_without_a_dead_letter_topic_the_handlers_error_stops(shop, member):
    def handler(tx, messages):
        raise ValueError("each")

    found = member(handler)
    with pytest.raises(ValueError, match="each"):
        found.perform(2)
    assert found.offsets.to == {}
    assert found.working.counts.failed_attempts == 2


@pytest.mark.parametrize("refusal", [PartitionLost(), TransactionAborted("moved on", retryable=False)])
def test_offsets_that_are_refused_abort_and_are_read_again(shop, member, put, refusal):
    found = member(put, dead_letter_topic=LETTERS)
    found.offsets.refusals.append(refusal)
    assert found.perform(2) is True
    assert shop.both_have()
    assert found.working.counts.dead_letters == 0


def test_a_partition_that_is_lost_during_the_work_is_not_written(shop, member, put):
    def handler(tx, messages):
        put(tx, messages)
        found.partitions.remove([("input", 0)], 0)

    found = member(handler)
    assert found.perform(2) is True
    assert shop.both_have()


@pytest.mark.parametrize("error", [Fenced("by a peer"), TransactionInDoubt("no answer")])
def test_a_new_writer_is_opened_before_the_offsets_are_read_again(shop, member, put, error):
    found = member(put)
    found.offsets.refusals.append(error)
    assert found.perform(1) is True
    assert found.opened == 2


def test_a_new_writer_settles_a_doubt_also_when_partitions_leave_meanwhile(shop, member, put):
    def handler(tx, messages):
        put(tx, messages)
        found.unit.partitions[0].leaving = True

    found = member(handler)
    found.offsets.refusals.append(TransactionInDoubt("no answer"))
    assert found.perform(1) is True
    assert found.opened == 2


@pytest.mark.parametrize("kind", ["coroutine", "generator", "asynchronous generator"])
def test_a_handler_that_does_not_run_when_it_is_called_moves_no_offsets(shop, member, kind):
    async def coroutine(tx, messages):
        pass

    def generator(tx, messages):
        yield

    async def both(tx, messages):
        yield

    found = member({"coroutine": coroutine, "generator": generator}.get(kind, both), dead_letter_topic=LETTERS)
    with pytest.raises(IllegalStateError, match="none of it has run"):
        found.perform(2)
    assert found.offsets.to == {}
    assert found.working.counts.messages == 0


@pytest.mark.parametrize("kind", [CompletionPending, TransactionInDoubt])
def test_a_handlers_other_dual_write_says_nothing_about_ours(shop, member, put, kind):
    errors = [kind("another writer's")]

    def handler(tx, messages):
        put(tx, messages)
        if errors:
            raise errors.pop()

    found = member(handler)
    found.perform(2)
    assert shop.both_have(0, 1)
    assert found.offsets.to == {("input", 0): 2}
    assert found.working.counts.failed_attempts == 1


def test_a_dead_letter_tells_why_the_work_failed_not_what_delayed_it(shop, member, monkeypatch):
    reasons = []
    outages = [Unavailable("no broker"), Unavailable("no broker")]

    def note(message, error, **others):
        reasons.append(str(error))
        if outages:
            raise outages.pop()
        return []

    monkeypatch.setattr(consumer, "dead_letter_headers", note)

    def handler(tx, messages):
        raise ValueError("unreadable")

    member(handler, dead_letter_topic=LETTERS).perform(1)
    assert reasons == ["unreadable"] * 3


def test_two_processes_of_one_name_do_not_fight_for_ever(shop, member, put):
    found = member(put)
    found.offsets.refusals += [Fenced("by the other")] * 3
    assert found.perform(1) is True
    for _ in range(1):
        assert found.working.perform(found.unit) is True
    with pytest.raises(Fenced, match="3 times"):
        found.working.perform(found.unit)


def test_an_errors_own_words_are_in_the_headers_of_a_dead_letter():
    headers = dead_letter_headers(
        Read(7, topic="input", partition=3, headers=[("trace", b"abc"), ("empty", None)]),
        ValueError("x" * 5000),
        attempts=4,
        group="g",
    )
    assert headers[:2] == [("trace", b"abc"), ("empty", None)]
    ours = dict(headers[2:])
    assert ours["dualwrite.dead_letter.topic"] == b"input"
    assert ours["dualwrite.dead_letter.partition"] == b"3"
    assert ours["dualwrite.dead_letter.offset"] == b"7"
    assert ours["dualwrite.dead_letter.attempts"] == b"4"
    assert ours["dualwrite.dead_letter.group"] == b"g"
    assert ours["dualwrite.dead_letter.exception"] == b"builtins.ValueError"
    assert len(ours["dualwrite.dead_letter.reason"]) == 1000
