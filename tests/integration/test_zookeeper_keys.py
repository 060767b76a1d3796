"""The primitives of the store on a real ZooKeeper: conditions, the decision in one multi, and answers that are lost."""

import itertools
import secrets
import threading

import pytest
from harness.patience import wait_until
from harness.zookeeper_proxy import MULTI, SYNC, ZooKeeperProxy
from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError
from kazoo.security import make_digest_acl

from dualwrite.errors import ConfigurationError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.stores.keyed.store import Change
from dualwrite.stores.keyed.zookeeper import ZooKeeperDatabase
from dualwrite.testing import EmbeddedZooKeeper

KEY = ("state", "orders/eu")
names = (f"/test-{secrets.token_hex(4)}" for _ in itertools.count())


@pytest.fixture
def root():
    return next(names)


@pytest.fixture
def opened(dualwrite_zookeeper, root):
    """Opens databases on one root; closes them after the test."""
    made = []

    def open_one(hosts=None, **options):
        database = ZooKeeperDatabase(hosts or dualwrite_zookeeper.hosts, root=root, **options)
        made.append(database)
        database.check()
        return database

    yield open_one
    for database in made:
        database.close()


@pytest.fixture
def database(opened):
    return opened()


@pytest.fixture
def keys(database):
    return database.keys


@pytest.fixture
def client(dualwrite_zookeeper, root):
    """The user's own, with a place for the user's znodes."""
    made = KazooClient(dualwrite_zookeeper.hosts)
    made.start(timeout=60)
    made.create(f"{root}-user")
    yield made
    made.stop()
    made.close()


def put(keys, value, key=KEY):
    assert keys.write([Change(key, keys.get([key]).get(key), value)])
    return keys.get([key])[key]


def test_a_value_is_written_if_it_is_as_it_was_read(keys):
    assert keys.get([KEY]) == {}
    assert keys.write([Change(KEY, None, b"1")])
    first = keys.get([KEY])[KEY]
    assert first.value == b"1"
    assert not keys.write([Change(KEY, None, b"2")])
    assert keys.write([Change(KEY, first, b"2")])
    assert not keys.write([Change(KEY, first, b"3")])
    assert keys.get([KEY])[KEY].value == b"2"


def test_all_changes_or_none(keys):
    other, third = ("state", "other"), ("incident", "third")
    first, second = put(keys, b"1"), put(keys, b"1", other)
    put(keys, b"2")
    assert not keys.write([Change(other, second, b"2"), Change(third, None, b"1"), Change(KEY, first, b"3")])
    assert not keys.write([Change(other, second, b"2"), Change(KEY, first, None)]), "a condition alone counts"
    assert {key: entry.value for key, entry in keys.get([KEY, other, third]).items()} == {KEY: b"2", other: b"1"}
    assert keys.write([Change(other, second, b"2"), Change(third, None, b"1")])


def test_another_life_of_a_key_is_another_one(keys, database):
    """Its versions count from 0 again, so that the version alone would fit."""
    first = put(keys, b"1")
    assert keys.erase({KEY: first})
    again = put(keys, b"2")
    assert first.version[1] == again.version[1]
    with database.connect() as handle:
        assert not keys.commit(handle, [Change(KEY, first, b"3")], answer_s=60)
    assert not keys.write([Change(KEY, first, b"3")])
    assert not keys.erase({KEY: first})
    assert keys.get([KEY])[KEY].value == b"2"


def test_names_of_any_kind_are_found_by_their_beginning(keys):
    for name in ("a", "a/b", "a#1", "b", ".", "a%2F", "ä"):
        put(keys, name.encode(), ("state", name))
    put(keys, b"", ("incident", "a"))
    assert {name for _, name in keys.scan("state", "a")} == {"a", "a/b", "a#1", "a%2F"}
    assert {entry.value.decode() for entry in keys.scan("state", "").values()} == {
        "a",
        "a/b",
        "a#1",
        "b",
        ".",
        "a%2F",
        "ä",
    }


def test_the_decision_and_the_users_operations_happen_together(keys, database, client, root):
    first = put(keys, b"1")
    client.create(f"{root}-user/old", b"1")
    with database.connect() as handle:
        handle.multi.create(f"{root}-user/new", b"1")
        handle.multi.set_data(f"{root}-user/old", b"2", version=0)
        assert client.get_children(f"{root}-user") == ["old"]
        assert keys.commit(handle, [Change(KEY, first, b"2")], answer_s=60)
    client.sync("/")
    assert sorted(client.get_children(f"{root}-user")) == ["new", "old"]
    assert client.get(f"{root}-user/old")[0] == b"2"
    assert keys.get([KEY])[KEY].value == b"2"


def test_a_decision_on_a_key_that_has_changed_writes_nothing(keys, database, client, root):
    first = put(keys, b"1")
    put(keys, b"2")
    with database.connect() as handle:
        handle.multi.create(f"{root}-user/new")
        assert not keys.commit(handle, [Change(KEY, first, b"3")], answer_s=60)
    assert keys.get([KEY])[KEY].value == b"2"
    assert client.get_children(f"{root}-user") == []


@pytest.mark.parametrize(
    ("operation", "named", "cause", "retryable"),
    [
        (lambda multi, at: multi.create(f"{at}/there"), "create", NodeExistsError, False),
        (lambda multi, at: multi.set_data(f"{at}/there", b"", version=7), "set_data", BadVersionError, True),
        (lambda multi, at: multi.check(f"{at}/there", 7), "check", BadVersionError, True),
        (lambda multi, at: multi.delete(f"{at}/absent"), "delete", NoNodeError, False),
    ],
)
def test_the_users_operation_that_was_refused_is_named(
    keys, database, client, root, operation, named, cause, retryable
):
    first = put(keys, b"1")
    at = f"{root}-user"
    client.create(f"{at}/there")
    with database.connect() as handle:
        handle.multi.create(f"{at}/before")
        operation(handle.multi, at)
        handle.multi.create(f"{at}/after")
        with pytest.raises(TransactionAborted, match=rf"refuses {named}\('{at}/.*{cause.__name__}") as caught:
            keys.commit(handle, [Change(KEY, first, b"2")], answer_s=60)
    assert isinstance(caught.value.__cause__, cause)
    assert (caught.value.retryable, caught.value.transactional_id) == (retryable, "orders/eu")
    assert keys.get([KEY])[KEY] == first
    assert client.get_children(at) == ["there"]


@pytest.mark.parametrize("fault", ["reset_request", "reset_answer", "hold_answer"])
def test_a_decision_without_an_answer_is_in_doubt_and_sent_once(dualwrite_zookeeper, opened, keys, client, root, fault):
    first = put(keys, b"1")
    with ZooKeeperProxy(dualwrite_zookeeper) as proxy:
        owner = opened(proxy.hosts)
        with owner.connect() as handle:
            handle.multi.create(f"{root}-user/new")
            sent = [one.kind for one in proxy.requests].count(MULTI)
            rule = getattr(proxy.on(), fault)()
            with pytest.raises(TransactionInDoubt):
                owner.keys.commit(handle, [Change(KEY, first, b"2")], answer_s=2)
            if fault == "hold_answer":
                rule.cut()
            wait_until(lambda: _answers(owner))
            assert [one.kind for one in proxy.requests].count(MULTI) == sent + 1, "it was sent again"
    was_done = fault.endswith("answer")
    assert keys.get([KEY])[KEY].value == (b"2" if was_done else b"1")
    assert client.get_children(f"{root}-user") == (["new"] if was_done else [])


def _answers(database):
    """Whether it is connected again, so that all it had kept to send is sent."""
    try:
        return database.keys.get([KEY])
    except Unavailable:
        return False


def test_a_late_decision_cannot_follow_a_write_of_its_settler(dualwrite_zookeeper, opened, keys, client, root):
    """Reading alone would not settle it: the request is still under way, on the connection of the owner's session."""
    first = put(keys, b"1")
    with ZooKeeperProxy(dualwrite_zookeeper) as proxy:
        owner = opened(proxy.hosts)
        with owner.connect() as handle:
            handle.multi.create(f"{root}-user/new")
            rule = proxy.on().hold_request()
            with pytest.raises(TransactionInDoubt):
                owner.keys.commit(handle, [Change(KEY, first, b"2")], answer_s=1)
            read = keys.get([KEY])[KEY]
            assert read == first
            assert keys.write([Change(KEY, read, b"settled")])
            rule.release()
            rule.wait_answered()
    assert keys.get([KEY])[KEY].value == b"settled"
    assert client.get_children(f"{root}-user") == []


def test_a_decision_is_not_sent_into_a_lost_connection(dualwrite_zookeeper, opened, keys):
    first = put(keys, b"1")
    with ZooKeeperProxy(dualwrite_zookeeper) as proxy:
        owner = opened(proxy.hosts)
        with owner.connect() as handle:
            proxy.__exit__(None, None, None)
            wait_until(lambda: not owner._kazoo.connected)
            with pytest.raises(TransactionAborted, match="was lost before"):
                owner.keys.commit(handle, [Change(KEY, first, b"2")], answer_s=2)
        proxy.__enter__()
    assert keys.get([KEY])[KEY] == first


def test_a_session_that_expired_on_the_way_decides_nothing(opened, keys, client, root):
    first = put(keys, b"1")
    owner = opened()
    with owner.connect() as handle:
        handle.multi.create(f"{root}-user/new")
        session = owner._kazoo.client_id
        expire(owner._kazoo)
        wait_until(lambda: owner._kazoo.connected and owner._kazoo.client_id[0] != session[0])
        with pytest.raises(TransactionAborted, match="session with ZooKeeper expired") as caught:
            owner.keys.commit(handle, [Change(KEY, first, b"2")], answer_s=60)
        assert caught.value.retryable
    assert keys.get([KEY])[KEY] == first
    assert client.get_children(f"{root}-user") == []
    with owner.connect() as handle:
        assert owner.keys.commit(handle, [Change(KEY, first, b"2")], answer_s=60)


def expire(kazoo):
    """End the client's session on the server, as its time-out does."""
    other = KazooClient(kazoo.hosts[0][0] + ":" + str(kazoo.hosts[0][1]), client_id=kazoo.client_id)
    other.start(timeout=60)
    other.stop()
    other.close()


def test_settlers_of_one_key_exclude_each_other(opened):
    one, two = opened().keys, opened().keys
    order = []

    def second():
        with two.locked([KEY, ("state", "other")], 60):
            order.append("second")

    with one.locked([("state", "other")], 60):
        with pytest.raises(Unavailable), two.locked([KEY, ("state", "other")], 0.3):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        with two.locked([("state", "third")], 60):
            order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_the_paths_have_the_acl_that_was_given(opened, client, root):
    acl = [make_digest_acl("writer", "secret", all=True)]
    owner = opened(auth=[("digest", "writer:secret")], acl=acl)
    put(owner.keys, b"1")
    with owner.connect() as handle:
        handle.multi.create(f"{root}-user/new")
        assert owner.keys.commit(handle, [Change(("state", "x"), None, b"1")], answer_s=60)
    client.add_auth("digest", "writer:secret")
    for path in (root, f"{root}/state", f"{root}/state/orders%2Feu", f"{root}/session", f"{root}-user/new"):
        assert [(one.perms, one.id.id.partition(":")[0]) for one in client.get_acls(path)[0]] == [(31, "writer")], path


@pytest.mark.parametrize("auth", [(), [("digest", "writer:wrong")]])
def test_a_wrong_digest_is_refused_with_the_remedy(opened, root, auth):
    opened(auth=[("digest", "writer:secret")], acl=[make_digest_acl("writer", "secret", all=True)])
    with pytest.raises(ConfigurationError, match=rf"refuses our session at {root}.*auth=") as caught:
        opened(auth=auth)
    assert "wrong" not in str(caught.value)


def test_a_client_of_the_users_own_stays_open(opened, client, root):
    with ZooKeeperDatabase(client, root=root) as database:
        database.check()
        put(database.keys, b"1")
    assert client.connected
    assert client.exists(f"{root}/state/orders%2Feu")


def test_a_root_that_is_something_else_is_refused(dualwrite_zookeeper, client, root):
    with (
        ZooKeeperDatabase(client, root=f"{root}-user") as database,
        pytest.raises(ConfigurationError, match="another root="),
    ):
        database.check()


def test_a_znode_that_was_edited_is_refused(keys, client, root):
    put(keys, b"1")
    client.set(f"{root}/state/orders%2Feu", b"edited")
    with pytest.raises(ConfigurationError, match="bad znode .*orders%2Feu"):
        keys.get([KEY])


def test_a_request_of_the_greatest_size_is_taken(keys, database, client, root):
    """A server takes all that `Multi` lets pass."""
    first = put(keys, b"1")
    with database.connect() as handle:
        size = 1_000_000
        while size > 1:
            try:
                handle.multi.create(f"{root}-user/of-{size}", bytes(size))
            except ConfigurationError:
                size //= 2
        assert keys.commit(handle, [Change(KEY, first, bytes(65_000))], answer_s=60)


def test_a_decision_that_no_server_would_take_is_not_sent(keys, database):
    first = put(keys, b"1")
    with database.connect() as handle, pytest.raises(TransactionAborted, match="jute.maxbuffer") as caught:
        keys.commit(handle, [Change(KEY, first, bytes(1_100_000))], answer_s=60)
    assert not caught.value.retryable
    with pytest.raises(ConfigurationError, match="jute.maxbuffer"):
        keys.write([Change(KEY, first, bytes(1_100_000))])


def test_a_read_sees_what_was_written_before_its_server_has_caught_up(dualwrite_zookeeper, opened, keys):
    put(keys, b"1")
    with ZooKeeperProxy(dualwrite_zookeeper) as proxy:
        reader = opened(proxy.hosts).keys
        held = proxy.on(SYNC).hold_request()
        found = []
        thread = threading.Thread(target=lambda: found.append(reader.get([KEY])[KEY].value))
        thread.start()
        held.wait(30)
        put(keys, b"2")
        held.release()
        thread.join(60)
    assert found == [b"2"]


@pytest.mark.thorough
def test_a_follower_that_is_behind_is_not_believed(root):
    """It was suspended, and has much to catch up with."""
    with EmbeddedZooKeeper(servers=3) as ensemble:
        [follower, *_] = [number for number in (1, 2, 3) if ensemble.mode(number) == "follower"]
        others = ",".join(ensemble.host(number) for number in (1, 2, 3) if number != follower)
        with ZooKeeperDatabase(others, root=root) as one, ZooKeeperDatabase(ensemble.host(follower), root=root) as two:
            one.check()
            two.check()
            put(one.keys, b"0")
            two.keys.get([KEY])
            ensemble.suspend(follower)
            for _ in range(60):
                put(one.keys, bytes(500_000), ("state", "large"))
            put(one.keys, b"newest")
            ensemble.resume(follower)
            assert two.keys.get([KEY])[KEY].value == b"newest"
