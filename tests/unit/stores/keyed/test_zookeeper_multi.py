"""The user's operations of a dual write, collected without a server."""

from __future__ import annotations

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.serialization import CheckVersion, Create, Delete, SetData

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.stores.keyed.zookeeper import JUTE_MAXBUFFER, LEAST_MAXBUFFER, Multi, Operations, Paths, Session, size_of


@pytest.fixture
def session() -> Session:
    return Session(KazooClient("unused:1"), Paths("/kafka"), None, 1.0)


@pytest.fixture
def operations(session: Session) -> Operations:
    return Operations(session)


@pytest.fixture
def multi(operations: Operations) -> Multi:
    return Multi(operations)


def test_the_operations_follow_those_of_the_library_in_order(
    session: Session, operations: Operations, multi: Multi
) -> None:
    multi.create("/a", b"1", sequence=True)
    multi.set_data("/b", b"2", version=3)
    multi.delete("/c")
    multi.check("/d", 4)
    request = session.new()
    request.check("/first", 0)
    operations.add_to(request)
    assert [type(one) for one in request.operations] == [CheckVersion, Create, SetData, Delete, CheckVersion]
    assert operations.names == ["create('/a')", "set_data('/b')", "delete('/c')", "check('/d', 4)"]
    assert len(multi) == 4


def test_cleared_it_is_empty(session: Session, operations: Operations, multi: Multi) -> None:
    multi.create("/a", bytes(900_000))
    operations.clear()
    multi.create("/a", bytes(900_000))
    request = session.new()
    operations.add_to(request)
    assert len(request.operations) == 1


def test_an_operation_that_would_exceed_a_request_is_refused_alone(
    session: Session, operations: Operations, multi: Multi
) -> None:
    multi.create("/a", bytes(500_000))
    with pytest.raises(ConfigurationError, match=r"create\('/b'\).*jute.maxbuffer"):
        multi.create("/b", bytes(500_000))
    multi.create("/c", bytes(400_000))
    request = session.new()
    operations.add_to(request)
    assert [one.path for one in request.operations] == ["/a", "/c"]
    assert size_of(request) < JUTE_MAXBUFFER


def test_a_greater_limit_takes_more(session: Session) -> None:
    Multi(Operations(session, 2 * JUTE_MAXBUFFER)).create("/a", bytes(1_500_000))
    with pytest.raises(ConfigurationError):
        Multi(Operations(session, LEAST_MAXBUFFER)).create("/a", bytes(LEAST_MAXBUFFER // 2))


def test_an_ephemeral_znode_is_refused(multi: Multi) -> None:
    with pytest.raises(ConfigurationError, match="no ephemeral znode"):
        multi.create("/a", ephemeral=True)
    assert len(multi) == 0


@pytest.mark.parametrize("path", ["/kafka", "/kafka/state/orders", "kafka/state", "//kafka//lock"])
def test_the_librarys_own_paths_are_refused(multi: Multi, path: str) -> None:
    with pytest.raises(ConfigurationError, match="the library's own"):
        multi.set_data(path, b"")
    assert len(multi) == 0


def test_a_wrong_argument_is_refused_where_it_is_given(multi: Multi) -> None:
    with pytest.raises(TypeError):
        multi.create("/a", "text")  # type: ignore[arg-type]
    assert len(multi) == 0


def test_after_the_block_it_takes_nothing(operations: Operations, multi: Multi) -> None:
    multi.create("/a")
    operations.end()
    assert len(multi) == 0
    with pytest.raises(IllegalStateError, match="has ended"):
        multi.create("/a")
