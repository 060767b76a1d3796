"""The metrics: counters and histograms that are recorded, and gauges that are read from the writers when they are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.metrics import CallbackOptions, Observation

from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
from dualwrite.protocol.lives__protocol_tables_write_phases import Phase, WriteOutcome
from dualwrite.telemetry import names
from dualwrite.telemetry.names import Instrument, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import Counter, Histogram, Meter

    from dualwrite.interfaces__ports_observer import Settled
    from dualwrite.protocol.process__protocol_process_health import Health

_MOST_NAMES: Final = 100
_OTHER: Final = "other"
_LOST: Final = (
    (DatabaseWentBack, "went back"),
    (OutcomeUnverifiable, "unverifiable"),
    (DecidedTransactionLost, "lost"),
)


_LongestOpen = Callable[[], float | None]
_Values = Iterable[tuple[float, dict[str, str]]]
_Read = Callable[["Health", _LongestOpen], _Values]


def _one(value: float | None) -> _Values:
    return [] if value is None else [(value, {})]


def _lanes(health: Health, _: _LongestOpen) -> _Values:
    idle = health.lanes - health.used - health.unsettled
    for state, count in (("used", health.used), ("idle", idle), ("unsettled", health.unsettled)):
        yield count, {names.LANE_STATE: state}


_OBSERVED: Final[dict[Metric, _Read]] = {
    names.READY: lambda health, _: _one(int(health.ready)),
    names.LANES: _lanes,
    names.LANES_MAX: lambda health, _: _one(health.max_lanes),
    names.WAITING: lambda health, _: _one(health.waiting),
    names.UNSETTLED_TIME: lambda health, _: _one(health.unsettled_s),
    names.OPEN_TIME: lambda health, _: _one(health.open_s),
    names.TIME_LEFT: lambda health, _: _one(health.time_left_s),
    names.KAFKA_OPEN_TIME: lambda _, longest_open_s: _one(longest_open_s()),
}


class Instruments:
    """All instruments of one meter. Used by many threads at once."""

    def __init__(self, meter: Meter) -> None:
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._open: dict[object, tuple[int, Callable[[], Health], _LongestOpen]] = {}
        self._duration = _histogram(meter, names.DURATION)
        self._phase_duration = _histogram(meter, names.PHASE_DURATION)
        self._group_units = _histogram(meter, names.GROUP_UNITS, names.BUCKETS_UNITS)
        self._writes = _counter(meter, names.WRITES)
        self._sent = _counter(meter, names.SENT)
        self._losses = _counter(meter, names.LOSSES)
        self._settled = _counter(meter, names.SETTLED)
        for metric, read in _OBSERVED.items():
            gauge = metric.instrument is Instrument.GAUGE
            create = meter.create_observable_gauge if gauge else meter.create_observable_up_down_counter
            create(metric.name, [self._callback(read)], metric.unit, metric.description)

    def phase(self, writer: str, phase: Phase, seconds: float) -> None:
        """A phase of a dual write has ended."""
        self._phase_duration.record(seconds, {names.WRITER: self._bounded(writer), names.PHASE: phase.value})

    def ended(self, writer: str, outcome: WriteOutcome, seconds: float, error: BaseException | None) -> None:
        """A dual write has ended."""
        attributes = {names.WRITER: self._bounded(writer), names.OUTCOME: outcome.value}
        self._duration.record(seconds, attributes)
        self._writes.add(1, attributes)
        if outcome in {WriteOutcome.LOST, WriteOutcome.UNVERIFIABLE} and error is not None:
            self.lost(error)

    def grouped(self, writer: str, units: int) -> None:
        """A group of units has ended."""
        self._group_units.record(units, {names.WRITER: self._bounded(writer)})

    def sent(self, topic: str, count: int) -> None:
        """Messages of a topic were handed to the producer."""
        attributes = {names.MESSAGING_SYSTEM: "kafka", names.DESTINATION: topic, names.MESSAGING_OPERATION: "send"}
        self._sent.add(count, attributes)

    def lost(self, loss: BaseException) -> None:
        """A loss was reported."""
        self._losses.add(
            1, {names.LOSS: next((name for kind, name in _LOST if isinstance(loss, kind)), "unverifiable")}
        )

    def settled(self, report: Settled) -> None:
        """A settling has ended."""
        for name, count in (
            ("rolled forward", len(report.rolled_forward)),
            ("retired", report.retired),
            ("repaired", len(report.repaired)),
        ):
            if count:
                self._settled.add(count, {names.SETTLEMENT: name})

    def opened(self, health: Callable[[], Health], longest_open_s: _LongestOpen) -> Callable[[], None]:
        """Read both of a writer whenever the metrics are collected, until the returned function is called."""
        key = object()
        self._open[key] = (os.getpid(), health, longest_open_s)

        def closed() -> None:
            self._open.pop(key, None)

        return closed

    def _callback(self, read: _Read) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observe(options: CallbackOptions) -> Iterator[Observation]:
            del options
            for pid, ask, longest_open_s in list(self._open.values()):
                if pid != os.getpid():
                    continue  # the parent's: it reports it itself
                health = ask()
                writer = self._bounded(health.writer)
                if writer != _OTHER:
                    for value, attributes in read(health, longest_open_s):
                        yield Observation(value, {names.WRITER: writer, **attributes})

        return observe

    def _bounded(self, writer: str) -> str:
        """The name as an attribute of metrics: some applications have a writer for each of their tenants."""
        if writer in self._names:
            return writer
        with self._lock:
            if len(self._names) < _MOST_NAMES:
                self._names.add(writer)
                return writer
        return _OTHER


def _counter(meter: Meter, metric: Metric) -> Counter:
    return meter.create_counter(metric.name, metric.unit, metric.description)


def _histogram(meter: Meter, metric: Metric, buckets: Sequence[float] = names.BUCKETS_S) -> Histogram:
    return meter.create_histogram(
        metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=buckets
    )
