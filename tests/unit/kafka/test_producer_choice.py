"""Which engine a producer gets: the user's, the environment's, or the best that cluster and settings allow."""

from __future__ import annotations

import logging

import pytest
from simulator.outside import SimulatedCoordinator

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.kafka import coordinator as coordinators
from dualwrite.kafka import engine as engines
from dualwrite.kafka.config import KafkaConfig, wanted_engine
from dualwrite.kafka.producer import choose_engine
from dualwrite.protocol.prepared_state import Engine

SERVERS = {"bootstrap.servers": "nowhere:1"}


class Cluster(SimulatedCoordinator):
    """A coordinator of a cluster with this transaction version."""

    def __init__(self, version):
        self.version = version

    def transaction_version(self, _, **__):
        return self.version


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    monkeypatch.setenv("DUALWRITE_PRODUCER_ENGINE", "auto")
    monkeypatch.setattr(engines, "_logged", set())


def chosen(name, version, settings=SERVERS):
    return choose_engine(wanted_engine(name), KafkaConfig.parse(settings), Cluster(version), Deadline(1), bulk=False)


@pytest.mark.parametrize(("version", "engine"), [(0, "librdkafka"), (1, "librdkafka"), (2, "native"), (3, "native")])
def test_the_cluster_decides_where_the_user_does_not(version, engine, caplog):
    with caplog.at_level(logging.INFO):
        assert [chosen("auto", version) for _ in range(2)] == [Engine(engine)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"producer engine: {engine}, as the cluster's transaction.version is {version}"
    ]


def test_a_setting_that_only_librdkafka_has_leaves_the_choice_to_it_and_is_named(caplog):
    with caplog.at_level(logging.INFO):
        assert chosen("auto", 2, {**SERVERS, "log_level": 7}) is Engine.LIBRDKAFKA
    assert "'log_level'" in caplog.text


def test_the_user_decides(monkeypatch):
    monkeypatch.setenv("DUALWRITE_PRODUCER_ENGINE", "native")
    assert chosen("librdkafka", 2) is Engine.LIBRDKAFKA
    assert chosen("auto", 2) is Engine.NATIVE
    monkeypatch.setenv("DUALWRITE_PRODUCER_ENGINE", "librdkafka")
    assert chosen("auto", 2) is Engine.LIBRDKAFKA
    assert chosen("native", 2) is Engine.NATIVE


def test_two_phase_commit_needs_the_native_engine():
    required = {**SERVERS, "transaction.two.phase.commit.enable": "true"}
    assert chosen("auto", 2, required) is Engine.NATIVE
    with pytest.raises(ConfigurationError, match="librdkafka cannot ask for two-phase commit"):
        chosen("librdkafka", 2, required)
    with pytest.raises(ConfigurationError, match="native transactions need 2"):
        chosen("auto", 1, required)
    assert chosen("librdkafka", 2, {**required, "transaction.two.phase.commit.enable": "false"}) is Engine.LIBRDKAFKA


def test_native_transactions_are_refused_where_the_cluster_has_none():
    with pytest.raises(ConfigurationError, match="transaction.version is 1: native transactions need 2"):
        chosen("native", 1)


def test_a_name_that_is_none_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="no producer engine 'java'"):
        wanted_engine("java")
    monkeypatch.setenv("DUALWRITE_PRODUCER_ENGINE", "java")
    with pytest.raises(ConfigurationError, match="no producer engine 'java'"):
        chosen("auto", 2)


class Features:
    """Two brokers with a transaction version each; counts how often they are asked. In place of ``Brokers``."""

    def __init__(self, *versions):
        self.versions, self.asked = list(versions), 0

    def __call__(self, *_, **__):
        return self

    def nodes(self, _deadline):
        return list(range(len(self.versions)))

    def exchange(self, requests, _deadline):
        self.asked += 1
        return [(0, {"transaction.version": self.versions[node]}) for node, _ in requests]


def test_the_version_is_asked_for_once_in_ten_seconds(monkeypatch):
    features, at = Features(2, 2), [1.0]
    monkeypatch.setattr(coordinators, "Brokers", features)
    monkeypatch.setattr(coordinators, "now_s", lambda: at[0])
    coordinator = coordinators.KafkaCoordinator(KafkaConfig.parse(SERVERS))
    assert [coordinator.transaction_version(Deadline(1)) for _ in range(3)] == [2, 2, 2]
    features.versions = [1, 2]
    at[0] = 10.9
    assert coordinator.transaction_version(Deadline(1)) == 2
    assert features.asked == 1
    at[0] = 11.0
    assert coordinator.transaction_version(Deadline(1)) == 1
    assert features.asked == 2


def test_a_version_that_was_finalized_a_moment_ago_is_not_refused(monkeypatch):
    features = Features(1, 1)
    monkeypatch.setattr(coordinators, "Brokers", features)
    config = KafkaConfig.parse(SERVERS)
    coordinator = coordinators.KafkaCoordinator(config)
    assert coordinator.transaction_version(Deadline(1)) == 1
    features.versions = [2, 2]
    assert choose_engine(Engine.NATIVE, config, coordinator, Deadline(1), bulk=False) is Engine.NATIVE
    assert coordinator.transaction_version(Deadline(1)) == 2
    assert features.asked == 2
