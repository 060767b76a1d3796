"""A transaction's records have unbroken sequence numbers; a gap before its first record shows that others were its own.

A tool that writes an abort marker into a partition (``kafka-transactions.sh abort``) ends there what a producer has written so
far. The broker takes the producer's next message for the first of another transaction, and shows only that one. In bulk mode
librdkafka reports no offsets, so nothing else tells that there were earlier messages. But it numbers the records of an epoch
in each partition one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SEQUENCES: Final = 2**31
Partition = tuple[str, int]
Span = tuple[int, int]
"""The sequence numbers of a first and of a newest record."""


class Sequences:
    """The sequence numbers of one producer's last transaction in each partition."""

    def __init__(self) -> None:
        self._ids: tuple[int, int] | None = None
        self._spans: dict[Partition, Span] = {}
        self._knows_all = True
        self._has_forgotten = False

    def take(self, ids: tuple[int, int], shown: Mapping[Partition, Span | None]) -> Partition | None:
        """Take the sequence numbers of a transaction whose messages are all delivered. It may be taken twice.

        Args:
            ids: Producer id and epoch. A new epoch numbers its records from 0.
            shown: By partition, the sequence numbers of the first and the newest record; None where they are not known.

        Returns:
            A partition that holds earlier messages of the same transaction; None if there is no such gap.
        """
        if ids != self._ids:
            # What was forgotten may have been written under these ids.
            self._ids, self._spans, self._knows_all = ids, {}, not self._has_forgotten
        self._has_forgotten = False
        gaps = [key for key, span in shown.items() if span is not None and not self._follows(key, span)]
        for key, span in shown.items():
            if span is None:
                self._spans.pop(key, None)
                self._knows_all = False
            else:
                self._spans[key] = span
        return min(gaps, default=None)

    def _follows(self, key: Partition, span: Span) -> bool:
        last = self._spans.get(key)
        if last is None:
            return span[0] == 0 or not self._knows_all
        return span[0] in {last[0], (last[1] + 1) % _SEQUENCES}

    def forget(self) -> None:
        """Forget them all: a transaction ends whose messages are only partly known, such as one that is aborted."""
        self._spans, self._knows_all, self._has_forgotten = {}, False, True
