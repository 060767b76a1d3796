"""Mistakes about ZooKeeper: what its conditions are for, and what an answer that is missing means."""

import time

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionLoss
from kazoo.protocol.serialization import CheckVersion, SetData

from dualwrite.stores.keyed.store import KeyedStore
from dualwrite.stores.keyed.zookeeper import Session, ZooKeeperHandle, ZooKeeperKeys
from harness.mistakes.registry import Check, mistake


def shown(test: str, shows: str) -> Check:
    """A test of the primitives on a real server."""
    return Check(f"integration/test_zookeeper_keys.py::{test}", shows)


def _change_conditions(patch: pytest.MonkeyPatch, change) -> None:
    require = ZooKeeperKeys._require

    def changed(self, request, changes):
        require(self, request, changes)
        request.operations[:] = [one for one in map(change, request.operations) if one is not None]

    patch.setattr(ZooKeeperKeys, "_require", changed)


@mistake(
    shown("test_a_decision_on_a_key_that_has_changed_writes_nothing", "assert not True"),
    Check(
        "conformance/test_deciding.py::test_a_decision_whose_row_was_claimed_before_its_commit_writes_nothing[zookeeper]",
        "DID NOT RAISE",
    ),
)
def zookeeper_version_not_required(patch: pytest.MonkeyPatch) -> None:
    """An owner decides in ZooKeeper even if another process has written the state's znode."""
    _change_conditions(patch, lambda one: one._replace(version=-1) if isinstance(one, SetData) else one)


@mistake(shown("test_another_life_of_a_key_is_another_one", "assert not True"))
def zookeeper_life_not_required(patch: pytest.MonkeyPatch) -> None:
    """A znode that was deleted and created again is taken for the former one if its version fits."""
    _change_conditions(patch, lambda one: None if isinstance(one, CheckVersion) and one.version == -1 else one)


@mistake(shown("test_a_session_that_expired_on_the_way_decides_nothing", "DID NOT RAISE"))
def zookeeper_session_not_required(patch: pytest.MonkeyPatch) -> None:
    """An owner decides although its session expired after the dual write had begun."""
    real = ZooKeeperHandle.__init__

    def init(self, session, jute_maxbuffer):
        real(self, session, jute_maxbuffer)
        self.alive = session.paths.root

    patch.setattr(ZooKeeperHandle, "__init__", init)


@mistake(shown("test_a_decision_without_an_answer_is_in_doubt_and_sent_once[reset_request]", "DID NOT RAISE"))
def zookeeper_multi_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A multi without an answer is sent again."""
    send = Session.send

    def twice(self, request, answer_s=None):
        try:
            return send(self, request, answer_s)
        except ConnectionLoss:
            time.sleep(0.5)
            request.committed = False
            return send(self, request, answer_s)

    patch.setattr(Session, "send", twice)


@mistake(shown("test_a_read_sees_what_was_written_before_its_server_has_caught_up", "no request came"))
def zookeeper_read_without_sync(patch: pytest.MonkeyPatch) -> None:
    """A follower that is behind is believed."""
    patch.setattr(KazooClient, "sync_async", KazooClient.exists_async)


@mistake(
    Check(
        "integration/test_zookeeper_writer.py::test_a_multi_that_arrives_after_its_settler_happens_no_more",
        r"assert 0 == 1|'b'",
    )
)
def doubt_settled_by_reading_alone(patch: pytest.MonkeyPatch) -> None:
    """An owner without an answer reads the row, and believes it while its request may still be on its way."""

    def read(self, transactional_id, deadline):
        del deadline
        [row] = self.read([transactional_id])
        return row

    patch.setattr(KeyedStore, "read_locked", read)
