"""Connections on a broker that misbehaves: answers late, in pieces, of garbage, or not at all; and callers that leave."""

import asyncio
import gc
import os
import socket
import ssl
import struct
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count

import pytest
from harness.interruption import Interruption
from harness.patience import PATIENCE_S
from kafka.protocol.metadata import ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from dualwrite.asyncio import transaction
from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.kafka import brokers as brokers_module
from dualwrite.kafka import connection as connection_module
from dualwrite.kafka import opening_messages
from dualwrite.kafka.brokers import Brokers, Connections, NotYet, answers_of_all
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.connection import Connection, ConnectionBroken
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.kafka.messages import EndTxn, NotOffered, OffsetForLeaderEpoch, TransactionEnded

LENGTH = struct.Struct(">i")
KEYS = {3: (0, 12), 17: (0, 1), 18: (0, 3), 26: (0, 5), 36: (0, 2)}
API_VERSIONS, HANDSHAKE, AUTHENTICATE, METADATA, END_TXN = 18, 17, 36, 3, 26
ENDED = struct.pack(">BihqhB", 0, 0, 0, 7, 4, 0)
CLOSE = object()
"""Instead of an answer: the broker closes the connection."""


class Broker:
    """Answers each request by its API key. An answer is the bytes behind the correlation id, CLOSE, or None for silence."""

    def __init__(self, node=0, others=()):
        self.node, self.others = node, others
        self.requests = []
        self.answers = {API_VERSIONS: lambda _: versions(KEYS), METADATA: self.described, END_TXN: lambda _: ENDED}
        self.send = lambda connection, data: connection.sendall(data)
        self.accepted = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._open = []
        threading.Thread(target=self._serve, daemon=True).start()

    def described(self, _):
        brokers = [(self.node, self.port), *((other.node, other.port) for other in self.others)]
        response = MetadataResponse(
            version=9,
            throttle_time_ms=0,
            brokers=[
                MetadataResponse.MetadataResponseBroker(node_id=node, host="127.0.0.1", port=port, rack=None)
                for node, port in brokers
            ],
            cluster_id="c",
            controller_id=self.node,
            topics=[],
        )
        return b"\0" + bytes(response.encode(version=9))

    def _serve(self):
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.accepted += 1
                self._open.append(connection)
                threading.Thread(target=self._answer_all, args=(connection,), daemon=True).start()

    def _answer_all(self, connection):
        with suppress(OSError), connection, connection.makefile("rb") as received:
            while head := received.read(LENGTH.size):
                request = received.read(*LENGTH.unpack(head))
                api_key, correlation_id = struct.unpack_from(">h2xi", request)
                self.requests.append(api_key)
                answer = self.answers[api_key](request)
                if answer is CLOSE:
                    return
                if answer is not None:
                    self.send(connection, framed(correlation_id, answer))

    def drop_all(self):
        """Close every connection."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop_all()


def framed(correlation_id, answer):
    return LENGTH.pack(4 + len(answer)) + LENGTH.pack(correlation_id) + answer


def versions(offered):
    response = ApiVersionsResponse(
        version=3,
        error_code=0,
        api_keys=[
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in offered.items()
        ],
        throttle_time_ms=0,
    )
    return bytes(response.encode(version=3))


@pytest.fixture
def broker():
    with closing(Broker()) as broker:
        yield broker


def config(*brokers, **more):
    servers = ",".join(f"127.0.0.1:{broker.port}" for broker in brokers)
    return KafkaConfig.parse({"bootstrap.servers": servers, **{key.replace("_", "."): more[key] for key in more}})


@pytest.fixture
def connections(broker):
    with closing(Connections(config(broker, client_id="app"))) as made:
        yield made


def end(connections, seconds=PATIENCE_S, node=0):
    return connections.exchange([(node, EndTxn("id", (7, 3), committed=True))], Deadline(seconds))[0]


def test_a_request_gets_its_answer(connections, broker):
    for _ in range(3):
        assert end(connections) == TransactionEnded(0, 7, 4)
    assert broker.requests == [API_VERSIONS, METADATA, API_VERSIONS, END_TXN, END_TXN, END_TXN]
    assert broker.accepted == 2  # one for the addresses, one for the broker by its id


def test_a_broker_has_just_answered_if_its_connection_is_open_and_nothing_is_outstanding(
    connections, broker, monkeypatch
):
    assert not connections.has_just_answered(0)
    monkeypatch.setattr(brokers_module, "_JUST_S", PATIENCE_S)
    end(connections)
    assert connections.has_just_answered(0)
    monkeypatch.setattr(brokers_module, "_JUST_S", 0.0)
    assert not connections.has_just_answered(0)
    monkeypatch.setattr(brokers_module, "_JUST_S", PATIENCE_S)
    broker.answers[END_TXN] = lambda _: None
    connections.post(0, EndTxn("id", (7, 3), committed=True), [].append)
    assert not connections.has_just_answered(0)
    connections.close()
    assert not connections.has_just_answered(0)


def test_several_requests_are_in_flight_and_get_their_own_answers(connections, broker):
    numbers = count(1)
    broker.answers[END_TXN] = lambda _: struct.pack(">BihqhB", 0, 0, 0, next(numbers), 4, 0)
    requests = [(0, EndTxn("id", (7, 3), committed=True)) for _ in range(20)]
    answers = connections.exchange(requests, Deadline(PATIENCE_S))
    assert [answer.producer_id for answer in answers] == list(range(1, 21))
    assert broker.accepted == 2
    spread = connections.exchange(requests * 2, Deadline(PATIENCE_S), spread=True)
    assert sorted(answer.producer_id for answer in spread) == list(range(21, 61))
    assert broker.accepted == 5


@pytest.mark.parametrize("second", [EndTxn("id", (8, 3), committed=True), OffsetForLeaderEpoch({("t", 0): 1})])
def test_a_request_with_more_to_come_leaves_with_the_next_one_even_if_that_is_not_offered(
    connections, broker, second, monkeypatch
):
    sent = []
    write = Connection._write
    end(connections)
    monkeypatch.setattr(Connection, "_write", lambda self, data: sent.append(data) or write(self, data))
    answers = []
    connections.post(0, EndTxn("id", (7, 3), committed=True), answers.append, more=True)
    assert not sent
    connections.post(0, second, answers.append)
    assert len(sent) == 1
    while len(answers) < 2:
        connections.serve(PATIENCE_S)
    assert answers.count(TransactionEnded(0, 7, 4)) == broker.requests.count(END_TXN) - 1
    assert [type(answer) for answer in answers if not isinstance(answer, TransactionEnded)] in ([], [NotOffered])
    end(connections)
    assert len(sent) == 2


def test_a_request_with_more_to_come_gets_an_error_when_the_connection_ends(connections, broker):
    end(connections)
    answers = []
    connection = connections.post(0, EndTxn("id", (7, 3), committed=True), answers.append, more=True)
    connection.fail(ConnectionBroken("ended"))
    assert [str(answer) for answer in answers] == ["ended"]
    end(connections)
    assert broker.requests.count(END_TXN) == 2


def test_an_answer_in_pieces_is_put_together(connections, broker):
    def one_by_one(connection, data):
        for byte in data:
            connection.sendall(bytes([byte]))

    broker.send = one_by_one
    assert end(connections) == TransactionEnded(0, 7, 4)


def test_several_answers_at_once_are_taken_apart(connections, broker):
    end(connections)
    kept = []
    broker.send = lambda connection, data: kept.append(data) or len(kept) < 3 or connection.sendall(b"".join(kept))
    requests = [(0, EndTxn("id", (7, 3), committed=True)) for _ in range(3)]
    assert len(connections.exchange(requests, Deadline(PATIENCE_S))) == 3


@pytest.mark.parametrize(
    "garbage",
    [
        LENGTH.pack(-1),
        LENGTH.pack(0),
        LENGTH.pack(2**31 - 1),
        LENGTH.pack(4) + LENGTH.pack(99),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "of the right length",
    ],
)
def test_an_answer_that_cannot_be_read_ends_the_connection_and_the_next_one_is_read(connections, broker, garbage):
    end(connections)
    if garbage == "of the right length":
        broker.answers[END_TXN] = lambda _: b"\xff" * len(ENDED)
    else:
        broker.send = lambda connection, _: connection.sendall(garbage)
    answer = end(connections)
    assert isinstance(answer, NotYet)
    assert answer.unreachable
    broker.send = lambda connection, data: connection.sendall(data)
    broker.answers[END_TXN] = lambda _: ENDED
    assert until_ended(connections) == TransactionEnded(0, 7, 4)


def until_ended(connections):
    """Ask until there is an answer: after a failure a connection pauses."""
    deadline = Deadline(PATIENCE_S)
    while True:
        try:
            answer = end(connections)
        except NotYet as reason:
            answer = reason
        if not isinstance(answer, NotYet):
            return answer
        assert not deadline.expired


def test_an_answer_nobody_asked_for_ends_the_connection(connections, broker):
    end(connections)
    broker.send = lambda connection, data: connection.sendall(data + data)
    assert end(connections) == TransactionEnded(0, 7, 4)
    broker.send = lambda connection, data: connection.sendall(data)
    assert until_ended(connections) == TransactionEnded(0, 7, 4)


def test_the_end_of_a_connection_is_the_answer_to_all_its_requests(connections, broker):
    end(connections)
    broker.answers[END_TXN] = lambda _: CLOSE
    requests = [(0, EndTxn("id", (7, 3), committed=True)) for _ in range(3)]
    answers = connections.exchange(requests, Deadline(PATIENCE_S))
    assert [isinstance(answer, NotYet) for answer in answers] == [True] * 3
    assert any(told in str(answers[0]) for told in ("closed the connection", "reset", "pipe"))


def test_a_connection_that_was_closed_at_rest_is_replaced_before_anything_is_sent(connections, broker, monkeypatch):
    monkeypatch.setattr(brokers_module, "_LOOK_AFTER_S", 0.0)
    end(connections)
    broker.drop_all()
    wait_for_the_end(connections)
    assert end(connections) == TransactionEnded(0, 7, 4)


def wait_for_the_end(connections):
    [one] = connections._connections.values()
    assert one._poll.poll(PATIENCE_S * 1000)


def test_a_connection_that_has_rested_too_long_is_replaced(broker):
    with closing(Connections(config(broker, connections_max_idle_ms=2000))) as connections:
        end(connections)
        [one] = connections._connections.values()
        one.used_at -= 3
        assert end(connections) == TransactionEnded(0, 7, 4)
        assert one.error is not None
    assert broker.accepted == 3


def test_a_late_answer_is_not_taken_for_another_requests(connections, broker):
    end(connections)
    first, numbers = threading.Event(), count(1)
    seen = []

    def answer(_):
        number = next(numbers)
        seen.append(number)
        if number == 1:
            first.wait(PATIENCE_S)
        return struct.pack(">BihqhB", 0, 0, 0, number, 4, 0)

    broker.answers[END_TXN] = answer
    with pytest.raises(NotYet, match="no answer"):
        end(connections, 0.2)
    first.set()
    assert end(connections).producer_id == 2
    assert broker.accepted == 2


def test_a_request_that_takes_too_long_ends_the_connection(broker):
    with closing(Connections(config(broker, socket_timeout_ms=300))) as connections:
        end(connections)
        broker.answers[END_TXN] = lambda _: None
        answer = end(connections)
        assert isinstance(answer, NotYet)
        assert "no answer within 0.3 s" in str(answer)


def test_a_broker_that_takes_no_bytes_is_no_answer_and_what_is_left_is_never_sent(connections, broker):
    end(connections)
    stopped = threading.Event()
    broker.answers[END_TXN] = lambda _: stopped.wait(PATIENCE_S) and CLOSE
    large = "x" * 30_000_000
    requests = [(0, EndTxn("id", (7, 3), committed=True)), (0, EndTxn(large, (7, 3), committed=True))]
    with pytest.raises(NotYet):
        connections.exchange(requests, Deadline(0.5))
    stopped.set()
    broker.answers[END_TXN] = lambda _: ENDED
    assert until_ended(connections) == TransactionEnded(0, 7, 4)
    assert broker.requests.count(END_TXN) == 3


def test_a_request_that_was_given_up_before_the_connection_was_open_is_never_sent(connections, broker):
    end(connections)
    broker.drop_all()
    opened = threading.Event()
    broker.answers[API_VERSIONS] = lambda _: opened.wait(PATIENCE_S) and versions(KEYS)
    for _ in range(3):
        with suppress(NotYet):
            end(connections, 0.1)
    before = broker.requests.count(END_TXN)
    opened.set()
    assert until_ended(connections) == TransactionEnded(0, 7, 4)
    assert broker.requests.count(END_TXN) == before + 1


def test_a_slow_broker_keeps_no_other_waiting(broker):
    with closing(Broker(1)) as other:
        broker.others = [other]
        opened = threading.Event()
        with closing(Connections(config(broker))) as connections:
            end(connections)
            other.answers[API_VERSIONS] = lambda _: opened.wait(PATIENCE_S) and versions(KEYS)
            answers = []
            connections.post(1, EndTxn("id", (7, 3), committed=True), answers.append)
            for _ in range(3):
                assert end(connections) == TransactionEnded(0, 7, 4)
            assert not answers
            opened.set()
            deadline = Deadline(PATIENCE_S)
            while not answers and not deadline.expired:
                connections.serve(1.0)
            assert answers == [TransactionEnded(0, 7, 4)]


def test_nobody_listens(broker):
    broker.close()
    with closing(Connections(config(broker))) as connections, pytest.raises(NotYet, match="refused") as caught:
        end(connections)
    assert caught.value.unreachable


def test_after_a_failure_a_connection_is_not_tried_again_at_once_and_the_reason_stays(connections, broker):
    end(connections)
    broker.answers[API_VERSIONS] = lambda _: CLOSE
    broker.drop_all()
    reasons = []
    for _ in range(50):
        with suppress(NotYet):
            reasons += [answer for answer in [end(connections)] if isinstance(answer, NotYet)]
    assert broker.accepted < 30
    assert all("closed the connection" in str(reason) or "reset" in str(reason) for reason in reasons)


def test_each_address_of_a_host_is_tried(broker, monkeypatch):
    look_up = socket.getaddrinfo

    def two(host, port, *how):
        found = look_up("127.0.0.1", port, socket.AF_INET, socket.SOCK_STREAM)
        if host != "broker.example":
            return look_up(host, port, *how)
        if how[-1] == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        [(family, kind, protocol, name, _)] = found
        return [(family, kind, protocol, name, ("127.0.0.1", closed_port())), *found]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    config = KafkaConfig.parse({"bootstrap.servers": f"broker.example:{broker.port}"})
    with closing(Connections(config)) as connections:
        assert connections.nodes(Deadline(PATIENCE_S)) == [0]


def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_brokers_refuse_if_nothing_listens_at_any_address():
    gone = f"127.0.0.1:{closed_port()}"
    with closing(Brokers(KafkaConfig.parse({"bootstrap.servers": gone}))) as brokers:
        assert brokers.refuse()
        brokers.addresses.learn([opening_messages.Broker(1, "127.0.0.1", closed_port())])
        assert brokers.refuse()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            brokers.addresses.learn([opening_messages.Broker(1, "127.0.0.1", listening.getsockname()[1])])
            assert not brokers.refuse()
            with closing(
                Brokers(KafkaConfig.parse({"bootstrap.servers": f"{gone},127.0.0.1:{listening.getsockname()[1]}"}))
            ) as others:
                assert not others.refuse()


def test_a_name_that_is_looked_up_for_long_does_not_outlast_the_deadline(monkeypatch):
    found = threading.Event()

    def slow(*how):
        if how[-1] == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        found.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "later")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    much_later = Deadline(PATIENCE_S)
    with closing(Connections(KafkaConfig.parse({"bootstrap.servers": "slow.example"}))) as connections:
        with pytest.raises(NotYet):
            connections.nodes(Deadline(0.2))
        assert not much_later.expired
        found.set()
        with pytest.raises(NotYet, match="was not found"):
            connections.nodes(Deadline(PATIENCE_S))


@pytest.mark.parametrize("newest", [None, 0])
def test_a_broker_that_knows_no_new_question_is_asked_the_old_one(connections, broker, newest):
    def answer(request):
        version = struct.unpack_from(">2xh", request)[0]
        if version > (newest or 0):
            return struct.pack(">hihhh", 35, 1, API_VERSIONS, 0, 0)
        keys = b"".join(struct.pack(">hhh", key, *offered) for key, offered in KEYS.items())
        return struct.pack(">hi", 0, len(KEYS)) + keys

    broker.answers[API_VERSIONS] = answer
    assert end(connections) == TransactionEnded(0, 7, 4)


def test_a_broker_that_is_too_old_is_a_matter_of_configuration(connections, broker):
    broker.answers[API_VERSIONS] = lambda _: versions(KEYS | {END_TXN: (0, 4)})
    with pytest.raises(ConfigurationError, match=r"too old.*EndTxn 5"):
        end(connections)


def test_a_broker_that_cannot_be_asked_for_a_right_refuses_nothing(broker):
    broker.answers[API_VERSIONS] = lambda _: versions(KEYS | {END_TXN: (0, 4)})
    with KafkaCoordinator(config(broker)) as coordinator:
        assert coordinator.may_write_as("sink#0.plan", Deadline(PATIENCE_S))


# Logins.


def login(broker, mechanism="PLAIN", **more):
    return config(
        broker,
        security_protocol="sasl_plaintext",
        sasl_mechanism=mechanism,
        sasl_username="ann",
        sasl_password="canary",
        **more,
    )


def handshake(code=0, mechanisms=("PLAIN",)):
    return bytes(SaslHandshakeResponse(error_code=code, mechanisms=list(mechanisms)).encode(version=1))


def authenticated(code=0, text=None, token=b"", lifetime_ms=0):
    response = SaslAuthenticateResponse(
        error_code=code, error_message=text, auth_bytes=token, session_lifetime_ms=lifetime_ms
    )
    return bytes(response.encode(version=1))


def test_a_login_that_ends_is_made_again_before_the_next_request(broker):
    broker.answers[HANDSHAKE] = lambda _: handshake()
    broker.answers[AUTHENTICATE] = lambda _: authenticated(lifetime_ms=3_600_000)
    with closing(Connections(login(broker))) as connections:
        end(connections)
        [one] = connections._connections.values()
        assert one._login_until is not None
        answers = []
        connections.post(0, EndTxn("id", (7, 3), committed=True), answers.append)
        one._login_until = 0.0
        assert end(connections) == TransactionEnded(0, 7, 4)  # not before the answer that is outstanding
        assert answers
        assert one._login_until > 0
    assert broker.requests[-4:] == [END_TXN, HANDSHAKE, AUTHENTICATE, END_TXN]
    assert broker.accepted == 2


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({HANDSHAKE: handshake(33, ["SCRAM-SHA-256"])}, "UnsupportedSaslMechanism; the broker knows SCRAM-SHA-256"),
        ({HANDSHAKE: handshake(34)}, "IllegalSaslState"),
        ({AUTHENTICATE: authenticated(58, "who?")}, "SaslAuthenticationFailed: who"),
        ({AUTHENTICATE: authenticated(token=b"more")}, "the login by PLAIN failed"),
    ],
)
def test_a_refused_login_is_a_matter_of_configuration(broker, answers, told):
    broker.answers |= {HANDSHAKE: lambda _: handshake(), AUTHENTICATE: lambda _: authenticated()}
    broker.answers |= {key: lambda _, answer=answer: answer for key, answer in answers.items()}
    with closing(Connections(login(broker))) as connections, pytest.raises(ConfigurationError, match=told) as caught:
        end(connections)
    assert "authentication" in str(caught.value)
    assert "canary" not in str(caught.value)


def test_what_came_before_the_end_of_a_connection_is_read(broker):
    """A broker that refuses a login says why and closes at once."""
    broker.answers[HANDSHAKE] = lambda _: handshake()
    broker.answers[AUTHENTICATE] = lambda _: authenticated(58, "who?")

    def and_close(connection, data):
        connection.sendall(data)
        if b"who?" in data:
            connection.shutdown(socket.SHUT_RDWR)

    broker.send = and_close
    with closing(Connections(login(broker))) as connections, pytest.raises(ConfigurationError, match="who"):
        end(connections)


@pytest.mark.parametrize("challenge", [b"", b"r=x,s=y,i=1", b"\xff\xff"])
def test_a_login_that_makes_no_sense_is_no_connection(broker, challenge):
    broker.answers[HANDSHAKE] = lambda _: handshake(0, ["SCRAM-SHA-256"])
    broker.answers[AUTHENTICATE] = lambda _: authenticated(token=challenge)
    with (
        closing(Connections(login(broker, "SCRAM-SHA-256"))) as connections,
        pytest.raises(NotYet, match="the login failed") as caught,
    ):
        end(connections)
    assert "canary" not in str(caught.value)


def test_a_server_that_speaks_no_tls_is_no_connection():
    def answer():
        with server.accept()[0] as one:
            one.recv(65536)
            one.sendall(b"HTTP/1.1 400 Bad Request")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(answer)
        settings = {"bootstrap.servers": f"127.0.0.1:{server.getsockname()[1]}", "security.protocol": "ssl"}
        with (
            closing(Connections(KafkaConfig.parse(settings))) as connections,
            pytest.raises(NotYet, match="WRONG|RECORD_LAYER"),
        ):
            connections.nodes(Deadline(PATIENCE_S))


# Callers.


def test_an_interruption_at_any_line_of_a_request_mixes_up_no_answers_and_leaves_no_socket_open(broker, monkeypatch):
    numbers = count(1)
    broker.answers[END_TXN] = lambda _: struct.pack(">BihqhB", 0, 0, 0, next(numbers), 4, 0)
    made = []
    opened = connection_module._Socket
    monkeypatch.setattr(connection_module, "_Socket", lambda *arguments: made.append(opened(*arguments)) or made[-1])
    for line in count(1, 7):  # an opening has many lines
        with closing(Connections(config(broker))) as connections:
            interruption = Interruption(line)
            with suppress(KeyboardInterrupt, NotYet), interruption.armed():
                end(connections)
            if interruption.at is not None:
                asked = broker.requests.count(END_TXN)
                found = until_ended(connections).producer_id
                assert found > asked, interruption.at
        assert not [one for one in made if one.fileno() >= 0], interruption.at
        made.clear()
        if interruption.at is None:
            break
    assert line > 100


def test_an_interruption_at_any_line_of_a_request_on_an_open_connection_mixes_up_no_answers(broker):
    numbers = count(1)
    broker.answers[END_TXN] = lambda _: struct.pack(">BihqhB", 0, 0, 0, next(numbers), 4, 0)
    with closing(Connections(config(broker))) as connections:
        for line in count(1):
            until_ended(connections)
            interruption = Interruption(line)
            with suppress(KeyboardInterrupt), interruption.armed():
                end(connections)
            if interruption.at is None:
                break
            asked = next(numbers)
            assert until_ended(connections).producer_id > asked, interruption.at
    assert line > 20


def test_a_socket_that_nothing_refers_to_is_closed_in_silence(broker):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        one = connection_module._Socket(socket.AF_INET, socket.SOCK_STREAM, 0)
        one.connect(("127.0.0.1", broker.port))
        address = str(one.getsockname())
        del one
        gc.collect()
    assert not [warning for warning in told if address in str(warning.message)]


def test_a_task_waits_without_its_loop_and_one_that_is_cancelled_leaves_its_answer_behind(connections, broker):
    asked, held = threading.Event(), threading.Event()
    numbers = count(1)

    def answer(_):
        number = next(numbers)
        if number == 2:
            asked.set()
            held.wait(PATIENCE_S)
        return struct.pack(">BihqhB", 0, 0, 0, number, 4, 0)

    broker.answers[END_TXN] = answer

    async def main(pool):
        first = await transaction.run(pool, lambda: end(connections))
        waiting = asyncio.create_task(transaction.run(pool, lambda: end(connections)))
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.set()
        return first, await transaction.run(pool, lambda: end(connections))

    with ThreadPoolExecutor(1) as pool:
        first, last = asyncio.run(main(pool))
    assert (first.producer_id, last.producer_id) == (1, 3)
    assert broker.accepted == 2


def test_each_caller_of_shared_brokers_has_connections_of_its_own_and_they_are_used_again(broker):
    held, numbers = threading.Event(), count(1)
    broker.answers[END_TXN] = lambda _: ((next(numbers) == 1 and held.wait(PATIENCE_S)) and None) or ENDED
    with closing(Brokers(config(broker))) as brokers, ThreadPoolExecutor(1) as threads:
        brokers.nodes(Deadline(PATIENCE_S))
        patient = threads.submit(end, brokers)
        while END_TXN not in broker.requests:
            pass
        assert end(brokers) == TransactionEnded(0, 7, 4)
        with pytest.raises(NotYet):
            end(brokers, 0.0)
        assert not patient.done()
        held.set()
        assert patient.result() == TransactionEnded(0, 7, 4)
        accepted = broker.accepted
        end(brokers)
        assert broker.accepted == accepted
    with pytest.raises(IllegalStateError, match="closed"):
        end(brokers)


def test_connections_are_not_used_in_a_forked_process_nor_closed_there(connections, broker):
    end(connections)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            end(connections)
        except IllegalStateError as error:
            os.write(write, str(error).encode())
        finally:
            connections.close()
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        assert b"forked" in told.read()
    assert end(connections) == TransactionEnded(0, 7, 4)
    assert broker.accepted == 2


def test_what_is_closed_is_not_used(connections):
    end(connections)
    connections.close()
    connections.close()
    with pytest.raises(IllegalStateError, match="closed"):
        end(connections)
    with pytest.raises(IllegalStateError, match="closed"):
        connections.post(0, EndTxn("id", (7, 3), committed=True), print)


def test_requests_that_are_outstanding_when_all_is_closed_get_an_error(connections, broker):
    end(connections)
    broker.answers[END_TXN] = lambda _: None
    answers = []
    connections.post(0, EndTxn("id", (7, 3), committed=True), answers.append)
    connections.close()
    assert isinstance(answers[0], ConnectionBroken)


def test_kafka_pythons_messages_are_sent_too(connections):
    [answer] = connections.exchange([(0, MetadataRequest(topics=[]))], Deadline(PATIENCE_S))
    assert answer.cluster_id == "c"


def test_canonical_names_stand_for_a_bootstrap_server(monkeypatch):
    found = [(2, 1, 6, "b-1.example", ("10.0.0.1", 1)), (2, 1, 6, "", ("10.0.0.2", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    settings = {"client.dns.lookup": "resolve_canonical_bootstrap_servers_only", "bootstrap.servers": "b.example:1"}
    with closing(Connections(KafkaConfig.parse(settings))) as connections:
        addresses = connections.addresses
        assert [addresses.of(name) for name in addresses.bootstrap] == [("b-1.example", 1), ("b.example", 1)]


def test_a_context_of_tls_belongs_to_the_connections():
    settings = KafkaConfig.parse({"bootstrap.servers": "b:1", "security.protocol": "ssl"}).connecting()
    assert isinstance(settings.tls, ssl.SSLContext)
    assert "SSLContext" not in repr(settings)


def test_the_answers_of_all_brokers_come_before_the_word_that_one_is_away():
    class Three:
        def nodes(self, _):
            return [1, 2, 3]

        def exchange(self, asked, _):
            return [NotYet("away") if node == 1 else f"refused by {node}" for node, _ in asked]

    answers = answers_of_all(Three(), lambda node: node, Deadline(1))
    assert [next(answers), next(answers)] == ["refused by 2", "refused by 3"]
    with pytest.raises(NotYet, match="away"):
        next(answers)
