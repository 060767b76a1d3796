"""Peers: whose transactions are settled, in which order it is asked, and what is left to the next call."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from harness.served import SETTINGS

from dualwrite.consumer import partitions
from dualwrite.consumer.partitions import Peers
from dualwrite.errors import ConfigurationError, DecidedTransactionLost, Unavailable
from dualwrite.protocol.findings import standby


@pytest.fixture
def asked(monkeypatch):
    """A group with one dead member; what was asked, in order."""
    found = SimpleNamespace(order=[], unsettled=["g/dead#1", "g/alive"], members={"g/alive", "g/ours"}, losses=[])

    def status(**given):
        found.order.append(("status", given["prefix"]))
        return [
            SimpleNamespace(row=SimpleNamespace(transactional_id=name), needs_recovery=True) for name in found.unsettled
        ]

    def recover(name, **_):
        found.order.append(("recover", name))
        return SimpleNamespace(settled=[name], losses=found.losses)

    def members(_):
        found.order.append(("members",))
        if isinstance(found.members, Exception):
            raise found.members
        return found.members

    monkeypatch.setattr(partitions, "status", status)
    monkeypatch.setattr(partitions, "recover", recover)
    monkeypatch.setattr(Peers, "_members", members)
    return found


def settle():
    return Peers("g", "g/ours", kafka=SETTINGS, database=None).settle()


def test_the_dead_are_settled_and_the_members_are_listed_after_their_transactions(asked):
    assert settle() == ["g/dead"]
    assert asked.order == [("status", "g/"), ("members",), ("recover", "g/dead")]


def test_a_group_without_anything_open_is_not_asked_for_its_members(asked):
    asked.unsettled = []
    assert settle() == []
    assert asked.order == [("status", "g/")]


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no database"),
        standby(is_standby=True).as_error(),
        KafkaException(KafkaError(KafkaError._TIMED_OUT)),
        TimeoutError(),
    ],
)
def test_servers_out_of_reach_are_left_to_the_next_call(asked, error, caplog):
    asked.members = error
    assert settle() == []
    assert "retrying later" in caplog.text


def test_what_a_person_must_see_is_raised(asked):
    asked.losses = [SimpleNamespace(as_error=lambda: DecidedTransactionLost("lost"))]
    with pytest.raises(DecidedTransactionLost):
        settle()
    asked.members = ConfigurationError("another cluster")
    with pytest.raises(ConfigurationError):
        settle()
