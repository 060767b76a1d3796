"""``ZooKeeperDatabase`` before it connects."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
from kazoo.client import KazooClient
from kazoo.security import OPEN_ACL_UNSAFE

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.stores.keyed.zookeeper import ZooKeeperDatabase


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("zookeeper://a:2181,b:2182", "a:2181,b:2182/kafka_transaction_state"),
        ("zookeeper://a/app/", "a:2181/app/kafka_transaction_state"),
        ("zookeeper://user:p%40ss@a:1,b:2/app", "a:1,b:2/app/kafka_transaction_state"),
    ],
)
def test_a_url_names_servers_and_chroot(url: str, shown: str) -> None:
    with ZooKeeperDatabase.from_url(url) as database:
        assert repr(database) == f"<ZooKeeperDatabase {shown}>"


def test_a_urls_credentials_are_those_of_a_digest() -> None:
    with ZooKeeperDatabase.from_url("zookeeper://user:p%40ss@a:1") as database:
        assert database._kazoo.auth_data == {("digest", "user:p@ss")}
        assert "p@ss" not in repr(database)


@pytest.mark.parametrize("url", ["zookeeper://", "zk://a:1", "zookeeper:///app", "zookeeper://a:1?x=1", "a:1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="no URL of ZooKeeper"):
        ZooKeeperDatabase.from_url(url)


@pytest.mark.parametrize("own", [{"auth": [("digest", "a:b")]}, {"acl": OPEN_ACL_UNSAFE}])
def test_a_client_brings_its_own_credentials(own: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="a client brings its own"):
        ZooKeeperDatabase(KazooClient("a:1"), **own)  # type: ignore[arg-type]


def test_a_client_that_is_not_started_is_refused() -> None:
    with pytest.raises(Unavailable, match="not connected"):
        ZooKeeperDatabase(KazooClient("a:1")).check()


def test_a_maxbuffer_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no room"):
        ZooKeeperDatabase("a:1", jute_maxbuffer=65536)


def test_without_kazoo_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.startswith("dualwrite.stores.keyed.zookeeper")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kazoo", None)
    with pytest.raises(ConfigurationError, match=r"dualwrite\[zookeeper\]"):
        import_module("dualwrite.stores.keyed.zookeeper")


def test_closed_it_serves_nobody() -> None:
    database = ZooKeeperDatabase("a:1")
    database.close()
    database.close()
    with pytest.raises(IllegalStateError, match="closed"):
        database.check()


def test_servers_that_do_not_answer_are_unavailable() -> None:
    with (
        ZooKeeperDatabase("127.0.0.1:1", answer_s=0.2) as database,
        pytest.raises(Unavailable, match="no server of ZooKeeper"),
    ):
        database.check()
