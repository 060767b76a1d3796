"""An owner that dies inside this process without any clean-up, as after SIGKILL. An operator that ends transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from confluent_kafka import Producer
from sqlalchemy import Engine

from dualwrite import DualWriter, failpoints
from dualwrite.stores.sql.store import SqlStateStore


def ended_by_hand(kafka: Mapping[str, str], engine: Engine) -> Callable[[str], None]:
    """For ``failpoints.hit``: an operator aborts the transaction of ``orders`` at the moment of its decision."""

    def end_it(name):
        if name == "write.decided":
            (row,) = SqlStateStore(engine).read(["orders"])
            Producer({**kafka, "transactional.id": row.kafka_id(row.incarnation)}).init_transactions(30)
        failpoints.pass_armed(name)

    return end_it


def mortal(writer: DualWriter) -> DualWriter:
    """From now on a lane that is given back is dead: the writer neither settles it nor records anything of it."""
    turns = writer._lanes._queue

    def on_freed(place, _now):
        turns.places.remove(place)
        place.thing.lane.discard()

    turns.on_freed = on_freed
    return writer
