"""A reserved port is free for the server that asks for it, and for no other process."""

from __future__ import annotations

import socket
import sys
from contextlib import closing

import pytest

from dualwrite.testing.servers.embedded import LOOPBACK, ReservedPort, accepts_connections

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports can be reserved on Linux only")


@pytest.fixture
def port():
    reserved = ReservedPort()
    yield reserved.number
    reserved.release()


def test_a_reserved_port_is_not_given_to_others(port):
    with closing(socket.socket()) as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((LOOPBACK, port))


def test_a_server_can_listen_on_its_reserved_port_again_and_again(port):
    for _ in range(2):
        assert not accepts_connections(port)
        with closing(socket.socket()) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((LOOPBACK, port))
            server.listen()
            assert accepts_connections(port)
