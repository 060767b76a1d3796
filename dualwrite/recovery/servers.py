"""The servers of a call for people: connections made from its arguments, and the rows that its arguments name."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator.client import KafkaCoordinator
from dualwrite.ports.store import StateStore
from dualwrite.protocol.naming import lane_id, writer_of
from dualwrite.protocol.rows import StateRow
from dualwrite.stores.connecting import engine_of
from dualwrite.stores.schema import check_schema
from dualwrite.stores.state import SqlStateStore

if TYPE_CHECKING:
    from sqlalchemy import Engine


@contextmanager
def connected_store(database: Engine | str, schema: str | None) -> Generator[SqlStateStore, None, None]:
    """The store over an engine, or over one made from a URL for the block.

    Raises:
        ConfigurationError: The tables are not as required.
    """
    used = engine_of(database)
    try:
        check_schema(used, schema)
        yield SqlStateStore(used, schema=schema)
    finally:
        if used is not database:
            used.dispose()


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
    if prefix is not None:
        raise TypeError("transactional_id and prefix exclude each other")
    return [*store.read([transactional_id]), *store.find(lane_id(transactional_id, 1)[:-1])]


def whole_writers(store: StateStore, rows: Sequence[StateRow]) -> Sequence[StateRow]:
    """The rows, and the other lanes of writers of which only some lanes were selected."""
    names = {row.transactional_id for row in rows}
    outside = {writer_of(name) for name in names} - names
    firsts = store.read(list(outside)) if outside else []
    lanes = [row for first in firsts for row in store.find(f"{first.transactional_id}#")]
    return [*rows, *(row for row in [*firsts, *lanes] if row.transactional_id not in names)]
