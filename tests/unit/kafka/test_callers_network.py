"""Requests in the caller's thread: answers are read without the loop, and everything else still gets its turn."""

import socket
import struct
import threading
import time
from contextlib import closing, suppress

import kafka.errors as kafka_errors
import pytest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from dualwrite.clock import Deadline
from dualwrite.kafka.callers_network import CallersNetwork
from dualwrite.kafka.network import NotYet, quieten_logs
from dualwrite.kafka.sockets import address_of

LENGTH = struct.Struct(">i")


class Broker:
    """Answers each request that comes in with what ``answer`` makes of its correlation id; None: not at all."""

    def __init__(self):
        self.answer = metadata
        self.requests = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, connection.makefile("rb") as received:
                    self._answer_all(connection, received)

    def _answer_all(self, connection, received):
        while head := received.read(LENGTH.size):
            request = received.read(*LENGTH.unpack(head))
            self.requests += 1
            answer = self.answer(*LENGTH.unpack_from(request, 4))
            if answer is None:
                return
            connection.sendall(answer)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


def metadata(correlation_id):
    response = MetadataResponse(brokers=[], topics=[], version=0)
    response.with_header(correlation_id=correlation_id)
    return response.encode(framed=True, header=True)


@pytest.fixture
def broker():
    quieten_logs()
    with closing(Broker()) as broker:
        yield broker


@pytest.fixture
def network(broker):
    settings = {"bootstrap_servers": [broker.address], "proxy_url": address_of("any"), "api_version": (0, 9)}
    with closing(CallersNetwork({"client_id": "any", **settings})) as network:
        yield network


def ask(network, seconds=5.0, topics=()):
    return network.exchange([("bootstrap-0", MetadataRequest(topics=list(topics)))], Deadline(seconds), 1, None)[0]


def test_a_connected_broker_is_asked_without_a_turn_of_the_loop(network, monkeypatch):
    assert ask(network).topics == []  # connects

    def turn(**_):
        pytest.fail("a turn of the loop")

    monkeypatch.setattr(network._loop, "poll", turn)
    assert ask(network).topics == []
    monkeypatch.undo()


def test_a_request_that_the_socket_does_not_take_at_once_arrives(network, broker):
    ask(network)
    large = [MetadataRequest.MetadataRequestTopic(name="x" * 30_000) for _ in range(1_000)]
    assert ask(network, 30.0, large).topics == []
    assert broker.requests == 2


def test_the_end_of_a_connection_is_the_answer_to_its_requests_and_the_next_one_goes_to_another(network, broker):
    ask(network)
    broker.answer = lambda _: None
    assert isinstance(ask(network), kafka_errors.KafkaConnectionError)
    broker.answer = metadata
    time.sleep(0.2)  # kafka-python waits before it connects again
    assert ask(network).topics == []


@pytest.mark.parametrize("answer", [LENGTH.pack(-1), LENGTH.pack(4) + LENGTH.pack(99), LENGTH.pack(0)])
def test_an_answer_that_cannot_be_read_ends_the_connection(network, broker, answer):
    ask(network)
    broker.answer = lambda _: answer
    assert isinstance(ask(network), kafka_errors.KafkaError)
    assert not network._asked or not network._asked[0].connected


def test_a_wait_for_one_answer_keeps_the_loop_from_nothing(network, broker):
    ask(network)
    done = threading.Event()
    broker.answer = lambda _: done.wait(5) and None
    mine, other = socket.socketpair()
    read = []

    async def task():
        await network._loop.wait_read(mine)
        read.append(mine.recv(1))

    with mine, other:
        mine.setblocking(False)
        network._loop.call_soon(task)
        other.send(b"x")
        network._loop.call_later(0.05, lambda: read.append("due"))
        with pytest.raises(NotYet):
            ask(network, 0.5)
        assert read in ([b"x", "due"], ["due", b"x"])
    done.set()


def test_what_a_poll_finds_is_taken_and_a_poll_without_an_answer_does_not_wait(network, broker):
    ask(network)
    answers = []
    network.post("bootstrap-0", MetadataRequest(topics=[]), answers.append)
    deadline = Deadline(5)
    while not answers and not deadline.expired:
        network.serve(0)
    assert answers[0].topics == []
    network.serve(0)
