"""Both engines say the same of one broker's answer; this one's state after it follows the wire's table."""

import itertools

import pytest
from confluent_kafka import KafkaError

from dualwrite.errors import CompletionPending, ConfigurationError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.error_codes import ADVICE, WITHIN_A_TRANSACTION, Code, Kind, Phase
from dualwrite.kafka.librdkafka import evidence as librdkafka
from dualwrite.kafka.native.produce_state import MEANINGS, Meaning, Refusal, Request, meaning_of
from dualwrite.kafka.native.producer import failure_of, refused
from dualwrite.protocol.lives import ProducerEvent

NOT_IN_OUR_TABLES = 999
CODES = [*(code for code in Code if code is not Code.NONE), NOT_IN_OUR_TABLES]
REQUESTS = {
    Phase.CREATE: None,
    Phase.INIT: Request.INIT_PRODUCER_ID,
    Phase.BEGIN: None,
    Phase.PRODUCE: Request.PRODUCE,
    Phase.DELIVERY: Request.PRODUCE,
    Phase.SEND_OFFSETS: Request.TXN_OFFSET_COMMIT,
    Phase.COMMIT: Request.END_TXN,
    Phase.ABORT: Request.END_TXN,
}
FLAGS = {
    Meaning.AGAIN: {"retriable": True},
    Meaning.MOVED: {"retriable": True},
    Meaning.ABORT: {"txn_requires_abort": True},
    Meaning.END: {"fatal": True},
}
"""librdkafka's flag on the answer to a call that stands for a meaning."""


def ends(code, phase):
    return meaning_of(REQUESTS[phase], code) is Meaning.END


FENCED = {code for code, advice in ADVICE.items() if advice.kind is Kind.FENCED}

# By what differs: the phases, the codes, and why.
EXCEPTIONS = {
    "event": (
        {Phase.PRODUCE, Phase.DELIVERY},
        {code for code in CODES if ends(code, Phase.DELIVERY)} - FENCED,
        "a delivery report has no flags: only librdkafka's next call says that the producer is dead",
    ),
    "next_step": (
        set(Phase),
        {Code.UNSUPPORTED_VERSION},
        "this engine needs transaction version 2, librdkafka's any transactions",
    ),
}


def native(code, phase):
    return failure_of(code, phase, transactional_id="tx-1", subject="orders")


def librdkafkas(code, phase):
    flags = FLAGS[meaning_of(REQUESTS[phase], code)] if phase is Phase.SEND_OFFSETS else {}
    return librdkafka.failure_of(KafkaError(code, "why", **flags), phase, transactional_id="tx-1", subject="orders")


def seen(failure):
    error = failure.error
    return {
        "class": type(error),
        "retryable": getattr(error, "retryable", None),
        "outcome": error.outcome,
        "next_step": error.next_step,
        "event": failure.event,
    }


def test_both_engines_say_the_same_of_every_code_in_every_phase_except_where_a_reason_is_given():
    different = set()
    for code, phase in itertools.product(CODES, Phase):
        ours, theirs = seen(native(code, phase)), seen(librdkafkas(code, phase))
        different |= {(what, phase, code) for what in ours if ours[what] != theirs[what]}
    assert different == {
        (what, phase, code) for what, (phases, codes, _) in EXCEPTIONS.items() for phase in phases for code in codes
    }


@pytest.mark.parametrize("phase", sorted(WITHIN_A_TRANSACTION, key=lambda phase: phase.value))
def test_the_producer_goes_on_after_an_abort_unless_its_incarnation_must_end(phase):
    for code in CODES:
        assert (native(code, phase).event is ProducerEvent.DOUBT) == ends(code, phase), code


def test_every_code_that_means_another_owner_ends_the_incarnation():
    for phase in WITHIN_A_TRANSACTION:
        assert all(ends(code, phase) for code in FENCED)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_missing_answer_leaves_the_producer_in_doubt(phase):
    found = failure_of(None, phase, transactional_id="tx-1")
    assert type(found.error) is (CompletionPending if phase is Phase.COMMIT else Unavailable)
    assert found.event is ProducerEvent.DOUBT
    assert found.error.next_step


@pytest.mark.parametrize(
    ("code", "phase", "error", "outcome"),
    [
        (Code.PRODUCER_FENCED, Phase.COMMIT, Fenced, "unknown"),
        (Code.INVALID_TXN_STATE, Phase.COMMIT, CompletionPending, "decided"),
        (Code.INVALID_PRODUCER_EPOCH, Phase.DELIVERY, Fenced, "aborted"),
        (Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Phase.INIT, ConfigurationError, "none"),
        (Code.COORDINATOR_NOT_AVAILABLE, Phase.INIT, Unavailable, "none"),
        (Code.MESSAGE_TOO_LARGE, Phase.DELIVERY, TransactionAborted, "aborted"),
    ],
)
def test_the_error_says_what_is_known_of_the_outcome(code, phase, error, outcome):
    found = native(code, phase).error
    assert type(found) is error
    assert found.outcome == outcome
    assert code.name in str(found)


@pytest.mark.parametrize("code", [code for code in MEANINGS[Request.PRODUCE] if code is not Code.NONE])
@pytest.mark.parametrize("meaning", [Meaning.ABORT, Meaning.END])
def test_a_refusal_is_the_error_of_its_code_and_keeps_its_own_meaning(code, meaning):
    found = refused(Refusal(meaning, code, ("orders", 3)), Phase.DELIVERY, transactional_id="tx-1")
    expected = native(code, Phase.DELIVERY).error
    assert type(found.error) is type(expected)
    assert found.error.next_step == expected.next_step
    assert "(orders): partition 3: " + code.name in str(found.error)
    assert found.event is (ProducerEvent.FAIL if meaning is Meaning.ABORT else ProducerEvent.DOUBT)


def test_messages_that_were_not_acknowledged_in_time_may_be_sent_in_another_transaction():
    found = refused(Refusal(Meaning.ABORT, None, ("orders", 3)), Phase.DELIVERY, transactional_id="tx-1")
    assert type(found.error) is TransactionAborted
    assert found.error.retryable
    assert found.event is ProducerEvent.FAIL
