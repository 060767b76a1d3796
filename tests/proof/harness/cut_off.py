"""A cluster with one broker that can be cut off from its controllers. Unlike a suspended broker, it goes on answering its clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.servers import kafka as embedded
from dualwrite.testing.servers.embedded import LOOPBACK
from dualwrite.testing.servers.kafka import server_properties
from harness.relay import Relay


class Cluster(EmbeddedKafka):
    """Three brokers. The first two are its controllers, and the third reaches them through relays."""

    CUT_OFF = 3

    def __init__(self, version: str | None = None) -> None:
        super().__init__(brokers=3, version=version)
        self.relays: dict[int, Relay] = {}

    def cut_off(self, broker: int) -> None:
        """Cut the broker off. It loses its leaderships when its session has ended, and does not learn of that."""
        assert broker == self.CUT_OFF
        for relay in self.relays.values():
            relay.cut()

    def join(self, broker: int) -> None:
        """Let it reach its controllers again."""
        assert broker == self.CUT_OFF
        for relay in self.relays.values():
            relay.join()


@contextmanager
def cluster_to_cut(version: str | None = None) -> Iterator[Cluster]:
    """The cluster, running; of another version of Kafka than usual, if one is given."""
    cluster = Cluster(version)

    def properties(*arguments: Any, node_id: int, controllers: Mapping[int, Any], **named: Any) -> dict[str, str]:
        two = {node: port for node, port in controllers.items() if node != cluster.CUT_OFF}
        made = server_properties(*arguments, node_id=node_id, controllers=controllers, **named)
        ports = {node: port.number for node, port in two.items()}
        if node_id == cluster.CUT_OFF:
            cluster.relays.update({node: Relay(port) for node, port in ports.items()})
            ports = {node: relay.port for node, relay in cluster.relays.items()}
            listeners = [one for one in made["listeners"].split(",") if not one.startswith("CONTROLLER:")]
            made |= {"process.roles": "broker", "listeners": ",".join(listeners)}
        return made | {"controller.quorum.voters": ",".join(f"{node}@{LOOPBACK}:{ports[node]}" for node in ports)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "server_properties", properties)
        with cluster:
            yield cluster
    for relay in cluster.relays.values():
        relay.close()
