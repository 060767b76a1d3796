"""One actor of a scenario on real servers: a process that opens a writer, writes, recovers, and stops at given points.

It stands at fail points: there it tells its director, who may then pause, kill, or let it go on to another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from harness.engines import answered
from harness.mistakes import MISTAKES, planted
from sqlalchemy import create_engine, insert, text
from sqlalchemy.exc import SQLAlchemyError

from dualwrite import DualWriter, WriterLimits, failpoints, recover
from dualwrite.kafka.config import EngineName
from dualwrite.units import UnitWriter
from scenarios.rows import ROWS

TRANSACTIONAL_ID = "orders"
TOO_LARGE = 2_000
RECORDS_OF_A_UNIT = 3


@dataclass(frozen=True)
class Settings:
    """The settings of an actor.

    Attributes:
        name: What the scenario calls it; stands in the row as its owner.
        kafka: librdkafka's configuration.
        url: Its database, through a proxy of its own.
        topic: The topic, of two partitions.
        narrow_topic: A topic that takes only small messages.
        log: Where it logs to.
        producer_engine: The engine of its producers.
        limits: Times of its writer that differ from the defaults.
        mistake: What to plant.
    """

    name: str
    kafka: dict[str, object]
    url: str
    topic: str
    narrow_topic: str
    log: str
    producer_engine: EngineName
    limits: dict[str, float] = field(default_factory=dict)
    mistake: str | None = None


class _ChangedItsMindError(Exception):
    pass


class _Gate:
    """Where an actor stands still: at the nth pass of one fail point."""

    def __init__(self, director: Connection) -> None:
        self._director = director
        self._lock = threading.Lock()
        self._point: str | None = None
        self._left = 0
        self.flush: Callable[[], object] = lambda: None

    def set(self, point: str | None, nth: int) -> None:
        with self._lock:
            self._point, self._left = point, nth

    def hit(self, name: str) -> None:
        with self._lock:
            if name != self._point:
                return
            self._left -= 1
            if self._left:
                return
            self._point = None
        if name == "write.produced":
            self.flush()  # what was handed to the producer is in the broker's log
        self._director.send({"at": name})
        order = self._director.recv()
        self.set(order["point"], order["nth"])


class _Actor:
    def __init__(self, settings: Settings, gate: _Gate) -> None:
        self._settings = settings
        self._gate = gate
        self._engine = create_engine(settings.url)
        self._writer: DualWriter | None = None
        self._units: UnitWriter | None = None

    def opens(self, lanes: int, *, outbox: bool) -> None:
        writer = DualWriter(
            TRANSACTIONAL_ID,
            kafka={**self._settings.kafka, "dualwrite.engine": self._settings.producer_engine},
            database=self._engine,
            limits=WriterLimits(max_lanes=lanes, **self._settings.limits),
            outbox="fallback" if outbox else "never",
        )
        self._writer = writer
        writer.open()

    def writes(self, label: str, *, aborts: bool = False, fault: str | None = None) -> None:
        assert self._writer is not None
        try:
            with self._writer.transaction() as tx:
                self._gate.flush = lambda: _flush(tx)
                for partition in (0, 1):
                    tx.produce(self._settings.topic, value=label, partition=partition)
                if fault == "with a message that is too large":
                    tx.produce(self._settings.narrow_topic, value="x" * TOO_LARGE)
                if fault == "with a statement that fails":
                    with contextlib.suppress(SQLAlchemyError):  # that is the fault
                        tx.connection.execute(text("SELECT 1 / 0"))
                else:
                    tx.connection.execute(insert(ROWS).values(label=label))
                if aborts:
                    raise _ChangedItsMindError
        except _ChangedItsMindError:
            return

    def opens_units(self) -> None:
        self._units = UnitWriter(
            self._settings.topic,
            kafka={**self._settings.kafka, "dualwrite.engine": self._settings.producer_engine},
            database=self._engine,
            part_records=RECORDS_OF_A_UNIT - 1,
        )
        self._units.open()

    def writes_unit(self, label: str) -> None:
        """A unit of two parts; its end commits with a row."""
        assert self._units is not None
        row = insert(ROWS).values(label=label)
        with self._units.unit(label, at_end=lambda tx: tx.connection.execute(row)) as unit:
            for number in range(RECORDS_OF_A_UNIT):
                unit.produce(label.encode(), f"{label}.{number}".encode())

    def recovers(self, *, after_restore: bool) -> None:
        recover(
            open_for_s=0,
            kafka=self._settings.kafka,
            database=self._engine,
            after_restore=after_restore,
        )

    def closes(self) -> None:
        assert self._writer is not None
        self._writer.close()


def _flush(tx: Any) -> None:
    answered(tx._dual_write._lane.producer)


def main(director: Connection, settings: Settings) -> None:
    """The process: performs the director's commands one after the other, until the connection closes."""
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    gate = _Gate(director)
    failpoints.hit = gate.hit
    if settings.mistake:
        assert settings.mistake in MISTAKES
        with planted(settings.mistake):
            _serve(director, settings, gate)
    else:
        _serve(director, settings, gate)


def _serve(director: Connection, settings: Settings, gate: _Gate) -> None:
    actor = _Actor(settings, gate)
    while True:
        try:
            order = director.recv()
        except EOFError:
            return
        gate.set(order["point"], order["nth"])
        try:
            getattr(actor, order["do"])(**order["with"])
        except Exception as error:
            logging.getLogger(__name__).exception("%s", order["do"])
            told, words = type(error).__name__, str(error)
        else:
            told, words = None, ""
        gate.set(None, 0)
        director.send({"ended": order["do"], "told": told, "words": words})
