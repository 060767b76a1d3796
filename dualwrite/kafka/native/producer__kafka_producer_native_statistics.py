"""Statistics of one producer, for ``stats_cb``: librdkafka's names and units for those that mean the same here."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.kafka.native.produce_state import Delivered, ProduceCore
    from dualwrite.kafka.native.settings import StatisticsCallback

logger = logging.getLogger(__name__)


class Statistics:
    """Counts what one producer sends, and calls ``stats_cb`` in the thread that uses the producer, whenever it is due.

    Args:
        transactional_id: Named in the statistics.
        interval_s: The least time between two calls, in seconds.
        callback: Called with JSON text.
    """

    def __init__(self, transactional_id: str, interval_s: float, callback: StatisticsCallback) -> None:
        self._id = transactional_id
        self._interval_s = interval_s
        self._callback = callback
        self._next_at: float | None = None
        self._messages = self._bytes = self._batches = 0

    def tell(self, delivered: Iterable[Delivered], core: ProduceCore, now: float) -> None:
        """Count acknowledged batches, and call the callback if it is due. Its exceptions are logged.

        Args:
            delivered: What was acknowledged since the last call.
            core: The current transaction's messages.
            now: The time, in seconds on the producer's clock.
        """
        for one in delivered:
            self._batches += 1
            self._messages += one.batch.body.count
            self._bytes += one.batch.body.size
        if self._next_at is not None and now < self._next_at:
            return
        first, self._next_at = self._next_at is None, now + self._interval_s
        if first:
            return
        found = {
            "name": self._id,
            "type": "producer",
            "engine": "native",
            "ts": int(now * 1_000_000),
            "time": int(time.time()),
            "msg_cnt": core.queued_messages,
            "msg_size": core.queued_bytes,
            "txmsgs": self._messages,
            "txmsg_bytes": self._bytes,
            "batches": self._batches,
            "requests_in_flight": core.in_flight,
        }
        try:
            self._callback(json.dumps(found))
        except Exception:
            logger.exception("%s: stats_cb raised", self._id)
