"""The spans of one dual write, and the trace context in the headers of its messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from dualwrite.clock import now_s
from dualwrite.interfaces__ports_observer import WriteObserver
from dualwrite.protocol.lives__protocol_tables_write_life import WriteState
from dualwrite.protocol.lives__protocol_tables_write_phases import PHASE_FROM, Phase, outcome_of
from dualwrite.telemetry import names

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer
    from typing_extensions import Self

    from dualwrite.interfaces__ports_observer import Headers
    from dualwrite.telemetry.observer__telemetry_instruments import Instruments

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
