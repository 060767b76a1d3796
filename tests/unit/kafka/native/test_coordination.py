"""Which request to a coordinator is sent again after which answer, and to which broker."""

from types import SimpleNamespace

import pytest

from dualwrite.clock import Deadline, running_on
from dualwrite.kafka.brokers import NotYet
from dualwrite.kafka.messages import TxnOffsetCommit
from dualwrite.kafka.native.coordination import Answered, CoordinatorRequests, Group, Offset
from dualwrite.kafka.native.produce_state import MEANINGS, Code, Meaning, Request

IDS, NEXT = (7, 3), (7, 4)
SILENCE = NotYet("no answer", unreachable=True)
GROUP, OFFSETS = Group("g"), {("t", 0): Offset(5), ("t", 1): Offset(6)}
ASK = {
    Request.INIT_PRODUCER_ID: lambda to, deadline: to.init_producer_id(1000, deadline),
    Request.END_TXN: lambda to, deadline: to.end(IDS, deadline, committed=True),
    Request.TXN_OFFSET_COMMIT: lambda to, deadline: to.commit_offsets(IDS, GROUP, OFFSETS, deadline),
}
REPEATED = {Meaning.AGAIN, Meaning.MOVED}


class Time:
    """A clock on which time passes only in waits."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class ScriptedBrokers:
    """Answers each request to a coordinator with the next code of the script, and all after its end with silence."""

    def __init__(self, *codes, found=(), away=(), answering=()):
        self.codes, self.found, self.away = list(codes), list(found), away
        self.answering = answering
        self.reached = []
        self.sent = []
        self.looked_up = 0

    def lookup(self, request, _deadline):
        [key] = request().keys
        self.looked_up += 1
        code = self.found.pop(0) if self.found else Code.NONE
        if isinstance(code, NotYet):
            raise code
        return {key: (int(code), 100 + self.looked_up)}

    def metadata(self, _topics, _deadline, *, node):
        self.reached.append(node)
        if node in self.away:
            raise NotYet("away")

    def has_just_answered(self, node):
        return node in self.answering

    def ask(self, node, request, _deadline):
        self.sent.append((node, request))
        code = self.codes.pop(0) if self.codes else SILENCE
        if isinstance(code, NotYet):
            return code
        of_partitions = code if isinstance(code, tuple) else (code,)
        if isinstance(request, TxnOffsetCommit):
            return {("t", number): int(one) for number, one in enumerate(of_partitions)}
        ids = NEXT if code is Code.NONE else (-1, -1)
        return SimpleNamespace(error_code=int(code), producer_id=ids[0], producer_epoch=ids[1])


@pytest.fixture(autouse=True)
def _own_time():
    with running_on(Time()):
        yield


def asked(request, *codes, **broker):
    brokers = ScriptedBrokers(*codes, **broker)
    answered = ASK[request](CoordinatorRequests(brokers, "id"), Deadline(60))
    return answered, brokers


ROWS = [(request, code, meaning) for request in ASK for code, meaning in MEANINGS[request].items()]


@pytest.mark.parametrize(("request_", "code", "meaning"), ROWS)
def test_an_answer_is_returned_unless_it_says_ask_again(request_, code, meaning):
    answered, brokers = asked(request_, code, Code.NONE)
    if meaning in REPEATED:
        assert answered.code == Code.NONE
        assert len(brokers.sent) == 2
        assert brokers.looked_up == (2 if meaning is Meaning.MOVED else 1)
        assert brokers.sent[1][0] == (102 if meaning is Meaning.MOVED else 101)
    else:
        assert answered.code == code
        assert len(brokers.sent) == 1


def test_a_new_producer_is_not_asked_for_again_after_silence():
    answered, brokers = asked(Request.INIT_PRODUCER_ID, Code.COORDINATOR_LOAD_IN_PROGRESS, SILENCE, Code.NONE)
    assert answered is None
    assert len(brokers.sent) == 2


def test_a_new_producer_is_asked_for_where_the_coordinator_answers():
    answered, brokers = asked(Request.INIT_PRODUCER_ID, Code.NONE, away=(101, 102))
    assert answered.code == Code.NONE
    assert brokers.reached == [101, 102, 103]
    assert [node for node, _ in brokers.sent] == [103]


def test_a_coordinator_that_has_just_answered_is_not_asked_whether_it_does():
    answered, brokers = asked(Request.INIT_PRODUCER_ID, Code.NONE, answering=(101,))
    assert answered.code == Code.NONE
    assert brokers.reached == []
    assert [node for node, _ in brokers.sent] == [101]


@pytest.mark.parametrize("request_", [Request.END_TXN, Request.TXN_OFFSET_COMMIT])
def test_what_names_its_transaction_is_sent_again_after_silence_to_whoever_coordinates_now(request_):
    answered, brokers = asked(request_, SILENCE, Code.NONE)
    assert answered.code == Code.NONE
    assert [node for node, _ in brokers.sent] == [101, 102]
    assert brokers.sent[0][1] is not brokers.sent[1][1]


@pytest.mark.parametrize("request_", ASK)
def test_no_answer_in_time_is_none(request_):
    assert asked(request_)[0] is None
    assert asked(request_, found=[NotYet("away")] * 10_000)[0] is None


@pytest.mark.parametrize("request_", ASK)
def test_the_last_answer_in_time_says_why_unless_the_transaction_may_have_ended(request_):
    busy = Code.CONCURRENT_TRANSACTIONS
    last = None if request_ is Request.END_TXN else Answered(busy)
    assert asked(request_, *[busy] * 10_000)[0] == last


@pytest.mark.parametrize("request_", ASK)
def test_a_coordinator_may_be_looked_for_any_number_of_times(request_):
    answered, brokers = asked(request_, Code.NONE, found=[NotYet("away"), Code.COORDINATOR_NOT_AVAILABLE])
    assert answered.code == Code.NONE
    assert len(brokers.sent) == 1


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Request.INIT_PRODUCER_ID, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Request.END_TXN, Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
        (Request.TXN_OFFSET_COMMIT, Code.GROUP_AUTHORIZATION_FAILED),
    ],
)
def test_a_coordinator_that_may_not_be_looked_for_is_an_answer(request_, code):
    answered, brokers = asked(request_, found=[code])
    assert answered == Answered(code)
    assert not brokers.sent


def test_the_ids_come_with_success_alone():
    assert asked(Request.END_TXN, Code.NONE)[0].ids == NEXT
    assert asked(Request.END_TXN, Code.PRODUCER_FENCED)[0].ids == (-1, -1)


def test_the_gravest_answer_of_the_partitions_counts():
    answered, _ = asked(Request.TXN_OFFSET_COMMIT, (Code.NONE, Code.ILLEGAL_GENERATION))
    assert answered.code == Code.ILLEGAL_GENERATION
    answered, brokers = asked(Request.TXN_OFFSET_COMMIT, (Code.NONE, Code.REQUEST_TIMED_OUT), (Code.NONE, Code.NONE))
    assert answered.code == Code.NONE
    assert len(brokers.sent) == 2


def test_groups_and_transactional_ids_have_coordinators_of_their_own():
    brokers = ScriptedBrokers(Code.NONE, Code.NONE, Code.NONE)
    requests = CoordinatorRequests(brokers, "id")
    requests.end(IDS, Deadline(60), committed=True)
    requests.commit_offsets(IDS, GROUP, OFFSETS, Deadline(60))
    requests.end(IDS, Deadline(60), committed=True)
    assert [node for node, _ in brokers.sent] == [101, 102, 101]
