"""``Telemetry``: the observer that records with OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace

from dualwrite.interfaces__ports_observer import Observer, SettleObserver, WriteObserver
from dualwrite.telemetry import names
from dualwrite.telemetry.observer__telemetry_instruments import Instruments
from dualwrite.telemetry.observer__telemetry_spans import WriteSpans, end

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from typing_extensions import Self

    from dualwrite.errors import DatabaseWentBack, DecidedTransactionLost, OutcomeUnverifiable
    from dualwrite.interfaces__ports_observer import Settled
    from dualwrite.protocol.process__protocol_process_health import Health


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

    Nothing is recorded without an SDK; the providers may get theirs later.

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
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        return WriteSpans(self.tracer, self.instruments, writer, database)

    def grouped(self, writer: str, units: int) -> None:
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        self.instruments.grouped(writer, units)

    def settling(self, transactional_ids: Sequence[str]) -> SettleObserver:
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        return _SettleSpan(self, names.SETTLE, len(transactional_ids))

    def recovering(self) -> SettleObserver:
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        return _SettleSpan(self, names.RECOVER, None)

    def lost(self, loss: DecidedTransactionLost | OutcomeUnverifiable | DatabaseWentBack) -> None:
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        self.instruments.lost(loss)

    def opened(self, health: Callable[[], Health], longest_open_s: Callable[[], float | None]) -> Callable[[], None]:
        """See :class:`dualwrite.interfaces__ports_observer.Observer`."""
        return self.instruments.opened(health, longest_open_s)
