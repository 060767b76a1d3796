"""The interface of a way into both sides, whatever engine runs it: tests/conformance/test_sinks.py asks for no more."""

from __future__ import annotations

from typing import Protocol

from harness.spark import SparkCase


class Sink(Protocol):
    """A way to write a batch of numbered rows to a topic and a table.

    Attributes:
        name: What users call it.
        decided_as_one: Whether all of a batch appears at once; otherwise partition by partition.
        errors: What a failed batch raises.
    """

    name: str
    decided_as_one: bool
    errors: tuple[type[Exception], ...]

    def write(self, case: SparkCase, rows: int, *, killed_at: str = "", table: str | None = None) -> None:
        """Write the batch; a later call runs the same batch again.

        Args:
            case: Where to.
            rows: How many rows the batch has, in two partitions at least.
            killed_at: Kill the process of the first attempt at one partition at this fail point.
            table: Another table than that of the case.

        Raises:
            Exception: One of :attr:`errors`.
        """
