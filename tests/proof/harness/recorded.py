"""OpenTelemetry's SDK with spans and metrics in memory, checked against the declared names."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from dualwrite import Telemetry
from dualwrite.telemetry import names


class Recorded:
    """A :class:`Telemetry`, and what it has recorded."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(sampler=sampler)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._meters = MeterProvider([self._reader])
        self.telemetry = Telemetry(tracer_provider=self.tracers, meter_provider=self._meters)

    @property
    def all(self) -> list[Any]:
        """All ended spans, the user's included."""
        return list(self._exporter.get_finished_spans())

    @property
    def spans(self) -> list[Any]:
        """The ended spans, in the order of their ends, checked against the table of names."""
        found = [span for span in self.all if span.instrumentation_scope.name == "dualwrite"]
        for span in found:
            declared = next(
                one for one in names.SPANS if one.name.partition("{")[0] in {span.name, f"{span.name.split()[0]} "}
            )
            assert span.kind.name == declared.kind
            assert set(span.attributes) <= set(declared.attributes)
        return found

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def clear(self) -> None:
        self._exporter.clear()

    def metric(self, metric: names.Metric) -> dict[tuple[str, ...], Any]:
        """The points of one metric by the values of its attributes, in the order in which they are declared."""
        data = self._reader.get_metrics_data()
        found = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for one in scope.metrics:
                    if one.name == metric.name:
                        assert (one.unit, one.description) == (metric.unit, metric.description)
                        for point in one.data.data_points:
                            assert set(point.attributes) == set(metric.attributes)
                            found[tuple(point.attributes[name] for name in metric.attributes)] = point
        return found

    def values(self, metric: names.Metric) -> dict[tuple[str, ...], float]:
        return {key: point.value for key, point in self.metric(metric).items()}

    def close(self) -> None:
        self._meters.shutdown()
        self.tracers.shutdown()
