"""kafka-python's loop: an interruption in the caller's thread is the caller's, and closing leaves no socket open."""

import gc
import selectors
import socket
import ssl
import warnings
from contextlib import closing, suppress
from itertools import count

import pytest
from harness.interruption import Interruption
from harness.patience import wait_until
from kafka.protocol.metadata import MetadataRequest

from dualwrite.clock import Deadline
from dualwrite.kafka.brokers import Brokers
from dualwrite.kafka.callers_network import CallersNetwork
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.network import Network, NotYet, _Files, quieten_logs
from dualwrite.kafka.sockets import PlainSocket, TlsSocket, address_of


class Interrupted(BaseException):
    pass


@pytest.fixture
def network():
    quieten_logs()
    with closing(CallersNetwork({"client_id": "any", "bootstrap_servers": ["127.0.0.1:1"]})) as network:
        yield network


async def interrupted():
    raise Interrupted


def test_an_interruption_that_kafka_python_swallows_comes_out(network):
    network._loop.call_soon(interrupted())
    with pytest.raises(Interrupted):
        network.serve(0)
    network.serve(0)


class Unregistered:
    def fileno(self):
        raise Interrupted


async def interrupted_before_it_waits(network):
    await network._loop.wait_read(Unregistered())


def test_an_interruption_that_kafka_python_keeps_for_the_next_turn_comes_out_of_this_one(network):
    network._loop.call_soon(interrupted_before_it_waits(network))
    with pytest.raises(Interrupted):
        network.serve(0)
    network.serve(0)


def test_an_interruption_between_requests_comes_out(network, monkeypatch):
    monkeypatch.setattr(network, "_lane", lambda: (_ for _ in ()).throw(Interrupted))
    with pytest.raises(Interrupted):
        network.exchange([], Deadline(5), 2, None)


def test_an_error_is_not_raised_where_nobody_waits_for_it(network):
    async def failing():
        raise LookupError

    network._loop.call_soon(failing())
    network.serve(0)


def test_a_file_is_known_from_its_registration_on_until_its_end():
    mine, other = socket.socketpair()
    with other, closing(_Files()) as files:
        with mine:
            with pytest.raises(KeyError):
                files.get_key(mine)
            assert files.register(mine, selectors.EVENT_READ) == files.get_key(mine) == files.get_key(mine.fileno())
            files.unregister(mine)
            with pytest.raises(KeyError):
                files.get_key(mine)
        with pytest.raises(KeyError):
            files.get_key(mine)  # kafka-python asks for a closed socket, too


@pytest.fixture
def silent():
    """A server that accepts connections and never reads nor writes."""
    quieten_logs()
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        yield server


def settings_for(server, **more):
    return {
        "client_id": "any",
        "bootstrap_servers": [f"127.0.0.1:{server.getsockname()[1]}"],
        "proxy_url": address_of("any"),
        **more,
    }


def large():
    """A request that no socket takes at once."""
    names = [MetadataRequest.MetadataRequestTopic(name="x" * 30_000) for _ in range(1_000)]
    return MetadataRequest(topics=names)


def waiting(network, event, server):
    """The connected sockets that the loop waits for, once there is one."""

    def look():
        if isinstance(network, CallersNetwork):
            network.serve(0.01)
        keys = list(network._loop._selector.get_map().values())
        return [key.fileobj for key in keys if key.events & event and _leads_to(key.fileobj, server)]

    wait_until(look)
    return look()


def _leads_to(one, server):
    try:
        return one.getpeername() == server.getsockname()
    except OSError:
        return False


def send(network, request):
    with pytest.raises(NotYet):
        network.exchange([("bootstrap-0", request)], Deadline(0.05), 1, None)


BOTH = pytest.mark.parametrize("make", [Network, CallersNetwork])


@BOTH
def test_a_connection_with_bytes_left_to_write_is_closed_with_the_network(make, silent):
    network = make(settings_for(silent, api_version=(0, 9)))  # a version without a greeting
    send(network, large())
    found = waiting(network, selectors.EVENT_WRITE, silent)
    network.close()
    assert [one.fileno() for one in found] == [-1]


@BOTH
def test_a_connection_in_its_handshake_is_closed_with_the_network(make, silent):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    network = make(settings_for(silent, security_protocol="SSL", ssl_context=context))
    send(network, MetadataRequest(topics=[]))
    found = [one for one in waiting(network, selectors.EVENT_READ, silent) if isinstance(one, TlsSocket)]
    network.close()
    assert [one.fileno() for one in found] == [-1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_connections_of_a_loop_that_has_crashed_are_closed(silent, monkeypatch):
    def crash():
        raise LookupError

    with closing(Brokers(KafkaConfig.parse({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"}))) as brokers:
        network = brokers._connected()
        send(network, MetadataRequest(topics=[]))
        found = waiting(network, selectors.EVENT_READ, silent)
        monkeypatch.setattr(network._loop, "_schedule_tasks", crash)
        network._loop.wakeup()
        wait_until(lambda: network._loop._exception is not None)
        with pytest.raises(NotYet, match="loop has ended"):
            brokers.metadata((), Deadline(0.5))
        assert [one.fileno() for one in found] == [-1]
        assert brokers._connected() is not network


def test_an_interruption_at_any_line_of_a_request_leaves_no_connection_open_after_the_network(silent, monkeypatch):
    made = []
    monkeypatch.setattr(PlainSocket, "socket", _remembering(made, PlainSocket.socket))
    for line in count(1):
        network = CallersNetwork(settings_for(silent, api_version=(0, 9)))
        interruption = Interruption(line)
        with suppress(KeyboardInterrupt, NotYet), interruption.armed():
            network.exchange([("bootstrap-0", MetadataRequest(topics=[]))], Deadline(0.1), 1, None)
        network.close()
        if interruption.at is None:
            break
        assert not [one for one in made if _leads_to(one, silent)], interruption.at
    assert made


def _remembering(made, make):
    def remember(self, *arguments):
        made.append(make(self, *arguments))
        return made[-1]

    return remember


def test_a_socket_that_nothing_refers_to_is_closed_in_silence(silent):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        client = PlainSocket(address_of("any")).socket(socket.AF_INET, socket.SOCK_STREAM, 0)
        client.connect(silent.getsockname())
        address = str(client.getsockname())
        del client
        gc.collect()
    with silent.accept()[0] as server:
        assert server.recv(1) == b""
    assert not [one for one in told if address in str(one.message)]
