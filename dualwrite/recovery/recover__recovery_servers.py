"""The servers of a call for people: connections made from its arguments, and the rows that its arguments name."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from dualwrite.interfaces import StateStore
from dualwrite.kafka.config__kafka_config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.protocol.values__protocol_naming import lane_id, writer_of
from dualwrite.protocol.values__protocol_rows import StateRow


@contextmanager
def connected_coordinator(kafka: Mapping[str, object]) -> Generator[KafkaCoordinator, None, None]:
    """A coordinator for the block."""
    coordinator = KafkaCoordinator(KafkaConfig.parse(kafka))
    try:
        yield coordinator
    finally:
        coordinator.close()


def rows_of(store: StateStore, transactional_id: str | None, prefix: str | None) -> Sequence[StateRow]:
    """The rows of one writer, or of all ids with a prefix, or all."""
    if transactional_id is None:
        return store.find(prefix or "")
    return [*store.read([transactional_id]), *store.find(lane_id(transactional_id, 1)[:-1])]


def whole_writers(store: StateStore, rows: Sequence[StateRow]) -> Sequence[StateRow]:
    """The rows, and the other lanes of writers of which only some lanes were selected."""
    names = {row.transactional_id for row in rows}
    outside = {writer_of(name) for name in names} - names
    firsts = store.read(list(outside)) if outside else []
    lanes = [row for first in firsts for row in store.find(f"{first.transactional_id}#")]
    return [*rows, *(row for row in [*firsts, *lanes] if row.transactional_id not in names)]
