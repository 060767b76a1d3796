"""Every error code of the requests of a transaction has a meaning, and no other code is taken for success."""

import kafka.errors as kafka_errors
import pytest

from dualwrite.kafka.native.produce_state import MEANINGS, Code, Meaning, Request, code_name, meaning_of

ENDS_THE_INCARNATION = {Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED, Code.INVALID_PRODUCER_ID_MAPPING}


@pytest.mark.parametrize("request_", list(Request))
def test_only_success_and_a_batch_that_the_broker_has_already_are_done(request_):
    done = {Code.NONE} | ({Code.DUPLICATE_SEQUENCE_NUMBER} if request_ is Request.PRODUCE else set())
    assert {code for code in range(-2, 200) if meaning_of(request_, code) is Meaning.DONE} == done


@pytest.mark.parametrize("request_", list(Request))
def test_a_code_without_a_row_ends_the_incarnation(request_):
    unknown = [code for code in range(-2, 200) if code not in MEANINGS[request_]]
    assert {meaning_of(request_, code) for code in unknown} == {Meaning.END}


@pytest.mark.parametrize("code", sorted(ENDS_THE_INCARNATION))
def test_another_owner_ends_the_incarnation_and_leaves_an_end_to_be_looked_up(code):
    assert meaning_of(Request.PRODUCE, code) is Meaning.END
    assert meaning_of(Request.TXN_OFFSET_COMMIT, code) is Meaning.END
    assert meaning_of(Request.END_TXN, code) is Meaning.NOT_OPEN


@pytest.mark.parametrize("request_", list(Request))
def test_what_kafka_calls_retriable_is_asked_again(request_):
    retriable = {code for code in MEANINGS[request_] if kafka_errors.for_code(code).retriable}
    if request_ is Request.TXN_OFFSET_COMMIT:
        # The id was a broker's answer: it will not become known, and the same request would name it again.
        retriable.remove(Code.UNKNOWN_TOPIC_ID)
    assert {meaning_of(request_, code) for code in retriable} == {Meaning.AGAIN, Meaning.MOVED}


def test_codes_are_kafkas():
    for code in Code:
        assert code in {-1, 0} or kafka_errors.for_code(code).errno == code
        assert code_name(code) == code.name


def test_an_unknown_code_is_named_by_its_number():
    assert code_name(999) == "error 999"
