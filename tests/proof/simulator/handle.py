"""Puts the simulated librdkafka in the place of the real one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, cast

from confluent_kafka import KafkaException

from dualwrite.clock import Deadline, now_s
from dualwrite.kafka.librdkafka.handle import NoAnswer
from simulator.client import SimulatedProducer
from simulator.scheduler import Simulation

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from dualwrite.kafka.librdkafka.handle import Handle

_LEFT_BEHIND_S: Final = 5.0
"""The caller has given up on a call that returns this much too late."""


class SimulatedHandle:
    """Stands in for :class:`dualwrite.kafka.librdkafka.handle.Handle`.

    Args:
        simulation: The simulation with the broker.
        settings: librdkafka's settings.
        eager: See :mod:`simulator.client`.
    """

    def __init__(self, simulation: Simulation, settings: Mapping[str, object], *, eager: bool = False) -> None:
        self.producer = SimulatedProducer(simulation, settings, eager=eager)

    @property
    def raw(self) -> Producer:
        """The producer."""
        return cast("Producer", self.producer)

    def timed(self, function: Callable[[Producer, float], object], deadline: Deadline) -> float:
        """Call the function, and return the seconds that it took.

        Raises:
            NoAnswer: The deadline had passed long before.
        """
        began, left_s = now_s(), deadline.remaining_s()
        self.producer.deadline = deadline
        try:
            function(self.raw, left_s)
        except KafkaException:
            if now_s() > began + left_s + _LEFT_BEHIND_S:
                raise NoAnswer from None
            raise
        return now_s() - began

    @property
    def init_unanswered(self) -> bool:
        """Whether the producer logged that it asks for a producer id again; see the real handle."""
        return self.producer.init_unanswered

    def close(self) -> None:
        """Destroy it. Requests already sent may still arrive."""
        self.producer.purge()


def make_handle(
    simulation: Simulation, *, eager: bool = False
) -> Callable[[Mapping[str, object], str, Deadline], Handle]:
    """The argument for ``TransactionalProducer(make_handle=...)``."""

    def make(settings: Mapping[str, object], transactional_id: str, deadline: Deadline) -> Handle:
        del transactional_id, deadline
        return cast("Handle", SimulatedHandle(simulation, settings, eager=eager))

    return make
