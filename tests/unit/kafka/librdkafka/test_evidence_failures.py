"""Every error of librdkafka becomes one of ours, in every phase and with every combination of flags."""

import itertools
import pickle

import pytest
from confluent_kafka import KafkaError, KafkaException

from dualwrite.errors import CompletionPending, ConfigurationError, Fenced, TransactionAborted, Unavailable
from dualwrite.kafka.error_codes import Phase
from dualwrite.kafka.librdkafka.evidence import failure_of, kafka_error, kafka_exception_behind
from dualwrite.kafka.librdkafka.handle import ClientLog
from dualwrite.protocol.lives import PRODUCER_LIFE, ProducerEvent, ProducerState

CODES = sorted({value for name in dir(KafkaError) if isinstance(value := getattr(KafkaError, name), int)})
FLAGS = [
    dict(zip(("fatal", "retriable", "txn_requires_abort"), on, strict=True))
    for on in itertools.product((False, True), repeat=3)
]
FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}

# What a phase may raise, beside Fenced.
OURS = {
    Phase.CREATE: {ConfigurationError},
    Phase.INIT: {ConfigurationError, Unavailable},
    Phase.BEGIN: {ConfigurationError, Unavailable},
    Phase.PRODUCE: {ConfigurationError, TransactionAborted},
    Phase.DELIVERY: {ConfigurationError, TransactionAborted},
    Phase.SEND_OFFSETS: {ConfigurationError, TransactionAborted},
    Phase.COMMIT: {CompletionPending},
    Phase.ABORT: {ConfigurationError, Unavailable},
}
FAILING = {Phase.PRODUCE, Phase.DELIVERY, Phase.SEND_OFFSETS}


def nothing():
    """An instance that, asked again, raises nothing."""


def failure(code, phase, subject="orders", **flags):
    return failure_of(KafkaError(code, "why", **flags), phase, transactional_id="tx-1", subject=subject)


@pytest.mark.parametrize("phase", list(Phase))
def test_every_code_with_every_flag_becomes_an_error_of_ours_that_fits_the_phase(phase):
    assert len(CODES) > 150
    for code, flags in itertools.product(CODES, FLAGS):
        found = failure(code, phase, **flags)
        assert type(found.error) in ({Fenced} if code in FENCED else OURS[phase]), (code, flags)
        assert isinstance(found.error.__cause__, KafkaException)
        assert found.error.__cause__.args[0].code() == code
        assert found.error.transactional_id == "tx-1"
        assert found.error.next_step
        assert pickle.loads(pickle.dumps(found.error)).what == found.error.what


@pytest.mark.parametrize("phase", list(Phase))
def test_fatal_and_fenced_always_cost_the_producer(phase):
    for code, flags in itertools.product(CODES, FLAGS):
        found = failure(code, phase, **flags)
        if flags["fatal"] or code in FENCED or phase not in FAILING:
            assert found.event is ProducerEvent.DOUBT
        assert found.event in PRODUCER_LIFE[ProducerState.BEGUN]


def test_an_error_of_a_transactional_call_without_any_flag_is_treated_as_fatal():
    assert failure(KafkaError._STATE, Phase.SEND_OFFSETS).event is ProducerEvent.DOUBT
    assert failure(KafkaError._STATE, Phase.SEND_OFFSETS, txn_requires_abort=True).event is ProducerEvent.FAIL
    assert failure(KafkaError._TRANSPORT, Phase.SEND_OFFSETS, retriable=True).event is ProducerEvent.FAIL


def test_a_failed_delivery_costs_the_transaction_and_not_the_producer():
    for code in set(CODES) - FENCED:
        assert failure(code, Phase.DELIVERY).event is ProducerEvent.FAIL


def test_no_error_of_a_commit_says_that_nothing_was_committed():
    for code, flags in itertools.product(CODES, FLAGS):
        error = failure(code, Phase.COMMIT, **flags).error
        assert error.outcome in {"unknown", "decided"}


def test_fenced_before_the_commit_means_on_neither_side():
    for phase in set(Phase) - {Phase.COMMIT}:
        assert failure(KafkaError._FENCED, phase, fatal=True).error.outcome == "aborted"


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "Write and Describe on topic orders"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "Write and Describe on transactional id tx-1"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, "Read on consumer group orders"),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, "IdempotentWrite on the cluster"),
    ],
)
@pytest.mark.parametrize("phase", [Phase.INIT, Phase.DELIVERY, Phase.SEND_OFFSETS])
def test_a_missing_right_is_named(code, named, phase):
    error = failure(code, phase).error
    assert type(error) is ConfigurationError
    assert named in str(error)


def test_a_transaction_timeout_above_the_brokers_names_the_brokers_setting():
    error = failure(KafkaError.INVALID_TRANSACTION_TIMEOUT, Phase.INIT, fatal=True).error
    assert type(error) is ConfigurationError
    assert "transaction.max.timeout.ms" in str(error)


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, "max.message.bytes"),
        (KafkaError.MSG_SIZE_TOO_LARGE, "lower batch.size"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "create the topic"),
        (KafkaError._UNKNOWN_TOPIC, "create the topic"),
        (KafkaError._UNKNOWN_PARTITION, "partition that the topic has"),
        (KafkaError.ILLEGAL_GENERATION, "poll the consumer again"),
        (KafkaError.FENCED_MEMBER_EPOCH, "poll the consumer again"),
    ],
)
def test_what_would_fail_again_is_not_retryable_and_says_what_to_do(code, step):
    error = failure(code, Phase.DELIVERY).error
    assert type(error) is TransactionAborted
    assert not error.retryable
    assert step in str(error)


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS, KafkaError._PURGE_QUEUE])
def test_what_may_succeed_the_next_time_is_retryable(code):
    assert failure(code, Phase.DELIVERY).error.retryable


def test_an_id_with_braces_is_shown_as_it_is():
    code = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    error = failure_of(KafkaError(code), Phase.INIT, transactional_id="{subject}{0}", subject=None).error
    assert "transactional id {subject}{0}" in str(error)


def test_an_exception_without_a_kafka_error_inside_is_an_error_all_the_same():
    assert kafka_error(KafkaException("text")).code() == KafkaError._FAIL
    assert kafka_error(KafkaException()).code() == KafkaError._FAIL


def test_the_error_behind_a_callback_that_returned_with_an_exception_set_is_found():
    fatal = KafkaException(KafkaError(KafkaError._FENCED, fatal=True))
    inner, outer = SystemError("returned a result with an exception set"), SystemError("and again")
    inner.__cause__, outer.__cause__ = fatal, inner
    assert kafka_exception_behind(fatal, nothing) is fatal
    assert kafka_exception_behind(outer, nothing) is fatal


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_fatal_error_that_confluent_kafka_has_lost_is_fatal_all_the_same(wrapped):
    lost = SystemError("<built-in method flush of cimpl.Producer object> returned NULL without setting an exception")
    error = SystemError("and again") if wrapped else lost
    error.__cause__ = lost if wrapped else None
    found = failure_of(kafka_exception_behind(error, nothing), Phase.DELIVERY, transactional_id="tx-1")
    assert type(found.error) is TransactionAborted
    assert found.event is ProducerEvent.DOUBT


@pytest.mark.parametrize(("fatal", "found"), [(True, Fenced), (False, TransactionAborted)])
def test_a_fatal_error_that_confluent_kafka_has_lost_is_asked_for_again(fatal, found):
    def ask():
        raise KafkaException(KafkaError(KafkaError._FENCED, fatal=fatal))

    lost = SystemError("<built-in method flush of cimpl.Producer object> returned NULL without setting an exception")
    failed = failure_of(kafka_exception_behind(lost, ask), Phase.DELIVERY, transactional_id="tx-1")
    assert type(failed.error) is found


def test_a_fatal_error_that_a_log_line_has_hidden_is_fatal_all_the_same():
    with pytest.raises(AttributeError) as raised:
        type(ClientLog.__name__, (), {})().log  # noqa: B018 - the words that the interpreter has for it
    hidden = AttributeError(str(raised.value))
    found = failure_of(kafka_exception_behind(hidden, nothing), Phase.DELIVERY, transactional_id="tx-1")
    assert type(found.error) is TransactionAborted
    assert found.event is ProducerEvent.DOUBT


def test_another_attribute_error_stays_what_it_is():
    with pytest.raises(AttributeError):
        kafka_exception_behind(AttributeError("'Deliveries' object has no attribute 'log'"), nothing)


def test_another_system_error_stays_what_it_is():
    other = SystemError("something else")
    other.__context__ = KafkaException(KafkaError(KafkaError._FENCED))
    with pytest.raises(SystemError) as raised:
        kafka_exception_behind(other, nothing)
    assert raised.value is other
