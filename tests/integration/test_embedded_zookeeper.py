"""The embedded ZooKeeper."""

import pytest
from harness.patience import wait_until
from kazoo.client import KazooClient

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.testing import EmbeddedZooKeeper
from dualwrite.testing.servers.databases import HOSTS_VARIABLE


@pytest.fixture
def client(dualwrite_zookeeper):
    made = KazooClient(dualwrite_zookeeper.hosts)
    made.start(timeout=60)
    yield made
    made.stop()
    made.close()


def test_what_was_answered_survives_a_kill(dualwrite_zookeeper, client):
    client.create("/survives", b"1", makepath=True)
    dualwrite_zookeeper.kill()
    assert not dualwrite_zookeeper.running
    assert dualwrite_zookeeper.mode() == ""
    dualwrite_zookeeper.start()
    assert dualwrite_zookeeper.mode() == "standalone"
    wait_until(lambda: client.connected)
    assert client.retry(client.get, "/survives")[0] == b"1"


def test_it_may_be_suspended_and_restarted(dualwrite_zookeeper, client):
    hosts = dualwrite_zookeeper.hosts
    dualwrite_zookeeper.suspend()
    assert dualwrite_zookeeper.running
    dualwrite_zookeeper.resume()
    dualwrite_zookeeper.restart()
    assert dualwrite_zookeeper.hosts == hosts
    with pytest.raises(IllegalStateError, match="already running"):
        dualwrite_zookeeper.start()
    with pytest.raises(IllegalStateError, match="no server 2"):
        dualwrite_zookeeper.kill(2)


def test_servers_of_the_environment_are_not_ours(monkeypatch):
    monkeypatch.setenv(HOSTS_VARIABLE, "elsewhere:2181")
    with EmbeddedZooKeeper() as zookeeper:
        assert zookeeper.hosts == "elsewhere:2181"
        assert zookeeper.running
        with pytest.raises(IllegalStateError, match="not ours"):
            zookeeper.kill()


def test_settings_that_the_server_refuses_are_told():
    with pytest.raises(ConfigurationError, match="ended with"):
        EmbeddedZooKeeper({"tickTime": "never"}).start()


@pytest.mark.thorough
def test_an_ensemble_keeps_its_data_when_the_leader_dies():
    with EmbeddedZooKeeper(servers=3) as zookeeper:
        assert sorted(zookeeper.mode(number) for number in (1, 2, 3)) == ["follower", "follower", "leader"]
        client = KazooClient(zookeeper.hosts)
        client.start(timeout=60)
        client.create("/survives", b"1")
        [leader] = [number for number in (1, 2, 3) if zookeeper.mode(number) == "leader"]
        zookeeper.kill(leader)
        wait_until(lambda: client.connected)
        assert client.retry(client.get, "/survives")[0] == b"1"
        client.stop()
        client.close()
