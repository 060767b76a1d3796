"""``Telemetry``: the observer that records dual writes with OpenTelemetry, as spans and as metrics.

The trace's context travels in the messages' headers, so that a consumer's spans continue it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from dualwrite.clock import now_s
from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable, extra_missing
from dualwrite.interfaces import Observer, OutboxNews, SettleObserver, WriteObserver
from dualwrite.protocol.lives import PHASE_FROM, Phase, WriteOutcome, WriteState, outcome_of
from dualwrite.telemetry import names
from dualwrite.telemetry.names import Instrument, Metric

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    raise extra_missing("telemetry", error) from error

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from typing_extensions import Self

    from dualwrite.interfaces import Headers, Settled
    from dualwrite.protocol.process import Health


class _SettleSpan(SettleObserver):
    """Records one settling, or a recovery with its settlings."""

    def __init__(self, telemetry: Telemetry, span: names.Span, ids: int | None) -> None:
        self._telemetry = telemetry
        self._making = telemetry.tracer.start_as_current_span(
            span.name, record_exception=False, set_status_on_exception=False, end_on_exit=False
        )
        self._ids = ids

    def settled(self, report: Settled) -> None:
        self._telemetry.instruments.settled(report)
        self._span.set_attributes(
            {
                names.ROLLED_FORWARD: len(report.rolled_forward),
                names.RETIRED: report.retired,
                names.REPAIRED: len(report.repaired),
            }
        )

    def __enter__(self) -> Self:
        self._span = self._making.__enter__()
        if self._ids is not None:
            self._span.set_attribute(names.SETTLED_IDS, self._ids)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._making.__exit__(None, None, None)
        end(self._span, error)


class Telemetry(Observer):
    """Records dual writes, settling and recoveries with OpenTelemetry. May be shared by all writers of a process.

    Nothing is recorded without an SDK. The SDK may be set up later than this.

    Args:
        tracer_provider: Makes the tracer; the global one if not given.
        meter_provider: Makes the meter; the global one if not given.
    """

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        release = version("dualwrite")
        self.tracer = trace.get_tracer("dualwrite", release, tracer_provider)
        self.instruments = Instruments(metrics.get_meter("dualwrite", release, meter_provider))

    def writing(self, writer: str, database: str) -> WriteObserver:
        return WriteSpans(self.tracer, self.instruments, writer, database)

    def grouped(self, writer: str, units: int) -> None:
        self.instruments.grouped(writer, units)

    def outbox(self, writer: str, news: OutboxNews, count: int) -> None:
        self.instruments.outbox(writer, news, count)

    def settling(self, transactional_ids: Sequence[str]) -> SettleObserver:
        return _SettleSpan(self, names.SETTLE, len(transactional_ids))

    def recovering(self) -> SettleObserver:
        return _SettleSpan(self, names.RECOVER, None)

    def lost(self, loss: DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack) -> None:
        self.instruments.lost(loss)

    def opened(self, health: Callable[[], Health], longest_open_s: Callable[[], float | None]) -> Callable[[], None]:
        return self.instruments.opened(health, longest_open_s)


# The spans of one dual write, and the trace context in the headers of its messages.

KAFKA: Final = "kafka"
_BAGGAGE: Final = "baggage"


def end(span: Span, error: BaseException | None, at_ns: int | None = None) -> None:
    """End the span, with the class of the error if there is one. Its text is left out: a driver's shows the values of rows."""
    if error is not None:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        span.set_attribute(names.ERROR, name)
        span.set_status(Status(StatusCode.ERROR))
    span.end(at_ns)


class _Send:
    """The span of the messages to one topic, and the headers with its context."""

    def __init__(self, span: Span, context: Context) -> None:
        self.span = span
        self._injected: dict[str, str] = {}
        propagate.inject(self._injected, trace.set_span_in_context(span, context))
        self._context_names = self._injected.keys() - {_BAGGAGE}

    def headers_for(self, own: Headers) -> Headers:
        """The message's own headers, and the trace context unless they already have one."""
        if not own:
            return list(self._injected.items())
        pairs = list(own.items()) if isinstance(own, Mapping) else list(own)
        found = {name.lower(): value for name, value in pairs}
        if self._context_names.isdisjoint(found):
            return [*pairs, *((name, value) for name, value in self._injected.items() if name not in found)]
        texts = {
            name: value.decode(errors="replace") if isinstance(value, bytes) else value or ""
            for name, value in found.items()
        }
        theirs = trace.get_current_span(propagate.extract(texts, contexts.Context())).get_span_context()
        if theirs.is_valid:
            self.span.add_link(theirs)
        return own


class WriteSpans(WriteObserver):
    """Records one dual write. Its span is current inside the ``with`` block, in whichever thread that is entered."""

    def __init__(self, tracer: Tracer, instruments: Instruments, writer: str, database: str) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._writer = writer
        self._database = database
        self._state: WriteState | None = None
        self._phase: Phase | None = Phase.LANE
        self._begun_at = self._phase_at = now_s()
        self._outer = contexts.get_current()
        self._span = tracer.start_span(names.DUAL_WRITE.name, self._outer, SpanKind.INTERNAL, {names.WRITER: writer})
        self._context = trace.set_span_in_context(self._span, self._outer)
        self._traced = self._span.is_recording()
        self._step: Span | None = None
        self._step_ended_ns: int | None = None
        self._sends: dict[str, _Send] = {}
        self._counts: dict[str, int] = {}

    def lane(self, transactional_id: str) -> None:
        """It has a lane."""
        self._span.set_attribute(names.TRANSACTIONAL_ID, transactional_id)
        self._change(Phase.BEGIN)

    def moved(self, state: WriteState) -> None:
        """The state, and so perhaps the phase, has changed."""
        self._state = state
        if (phase := PHASE_FROM.get(state)) is not self._phase:
            self._change(phase)

    def enter(self, phase: Phase) -> None:
        """Another phase begins."""
        self._change(phase)

    def _change(self, phase: Phase | None) -> None:
        now = now_s()
        if self._phase is not None:
            self._instruments.phase(self._writer, self._phase, now - self._phase_at)
        self._phase, self._phase_at = phase, now
        if not self._traced:
            return
        if phase is Phase.ABORT:
            self._step_ended_ns = time.time_ns()  # ended with the error, once that is known
            return
        if self._step_ended_ns is None:
            self._end_step(None)
        if phase is Phase.RECORD:
            self._end_sends(None)
        elif phase is Phase.DECIDE:
            self._begin_step(
                names.COMMIT.name, {names.DATABASE_SYSTEM: self._database, names.DATABASE_OPERATION: names.COMMIT.name}
            )
        elif phase is Phase.COMPLETE:
            self._begin_step(
                names.COMPLETE.name, {names.MESSAGING_SYSTEM: KAFKA, names.MESSAGING_OPERATION: names.COMPLETE.name}
            )

    def _begin_step(self, name: str, attributes: Mapping[str, str]) -> None:
        self._step = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes)

    def _end_step(self, error: BaseException | None) -> None:
        if self._step is not None:
            end(self._step, error, self._step_ended_ns)
            self._step = None

    def producing(self, topic: str, headers: Headers) -> Headers:
        """Add the trace context to the headers."""
        return self._send(topic).headers_for(headers) if self._traced else headers

    def sent(self, topic: str, count: int) -> None:
        """Count the messages."""
        self._counts[topic] = self._counts.get(topic, 0) + count
        if self._traced:
            self._send(topic)

    def _send(self, topic: str) -> _Send:
        found = self._sends.get(topic)
        if found is None:
            attributes = {
                names.MESSAGING_SYSTEM: KAFKA,
                names.DESTINATION: topic,
                names.MESSAGING_OPERATION: "send",
                names.MESSAGING_TYPE: "send",
            }
            span = self._tracer.start_span(f"send {topic}", self._context, SpanKind.PRODUCER, attributes)
            found = self._sends[topic] = _Send(span, self._context)
        return found

    def _end_sends(self, error: BaseException | None) -> None:
        for topic, send in self._sends.items():
            send.span.set_attribute(names.MESSAGE_COUNT, self._counts.get(topic, 0))
            end(send.span, error)
        self._sends = {}

    def __enter__(self) -> Self:
        contexts.attach(self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if trace.get_current_span() is self._span:
            # The token of `attach` is of use only in the context that it comes from; a web framework leaves a block in a copy.
            contexts.attach(self._outer)
        self._end_step(error)
        self._change(None)
        self._end_sends(error)
        self._traced = False
        for topic, count in self._counts.items():
            self._instruments.sent(topic, count)
        outcome = outcome_of(self._state, error)
        self._instruments.ended(self._writer, outcome, now_s() - self._begun_at, error)
        self._span.set_attribute(names.OUTCOME, outcome.value)
        end(self._span, error)


# The metrics: counters and histograms that are recorded, and gauges that are read from the writers when they are asked
# for.

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


def _of_outbox(value: Callable[[Health], float]) -> _Read:
    return lambda health, _: _one(None if health.outbox_later is None else value(health))


_OBSERVED: Final[dict[Metric, _Read]] = {
    names.READY: lambda health, _: _one(int(health.ready)),
    names.LANES: _lanes,
    names.LANES_MAX: lambda health, _: _one(health.max_lanes),
    names.WAITING: lambda health, _: _one(health.waiting),
    names.UNSETTLED_TIME: lambda health, _: _one(health.unsettled_s),
    names.OPEN_TIME: lambda health, _: _one(health.open_s),
    names.TIME_LEFT: lambda health, _: _one(health.time_left_s),
    names.OUTBOX_LATER: _of_outbox(lambda health: int(health.outbox_later is True)),
    names.OUTBOX_ROWS: _of_outbox(lambda health: health.outbox_rows),
    names.OUTBOX_BYTES: _of_outbox(lambda health: health.outbox_bytes),
    names.OUTBOX_AGE: _of_outbox(lambda health: health.outbox_oldest_s),
    names.OUTBOX_FULL: _of_outbox(lambda health: int(health.outbox_full is not None)),
    names.OUTBOX_STOPPED: _of_outbox(lambda health: int(health.outbox_stopped is not None)),
    names.KAFKA_OPEN_TIME: lambda _, longest_open_s: _one(longest_open_s()),
}

_OUTBOX: Final = {
    OutboxNews.FELL_BACK: names.FALLBACKS,
    OutboxNews.SENT: names.OUTBOX_SENT,
    OutboxNews.ASIDE: names.OUTBOX_ASIDE,
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
        self._outbox = {news: _counter(meter, metric) for news, metric in _OUTBOX.items()}
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

    def outbox(self, writer: str, news: OutboxNews, count: int) -> None:
        """Something has happened to messages that wait in the database."""
        self._outbox[news].add(count, {names.WRITER: self._bounded(writer)})

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
        # A counter whose first value is 1 shows no increase: an alert would miss the first loss of a process.
        for _, loss in _LOST:
            self._losses.add(0, {names.LOSS: loss})
        self.outbox(health().writer, OutboxNews.ASIDE, 0)
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
