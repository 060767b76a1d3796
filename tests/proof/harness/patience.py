"""Settings for tests on a machine that is busy with other things."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

PATIENCE_S = 600
"""How long a test waits for a process that takes seconds: longer, on a slow machine too, than all but what hangs."""

PATIENCE = {"retry.backoff.ms": "5000", "retry.backoff.max.ms": "5000"}


def patient(config: Mapping[str, str], engine: str | None = None) -> dict[str, str]:
    """The configuration, so that a call of librdkafka may take 4 s without costing its producer.

    With the default, a producer whose call took longer than 0.8 s is discarded, as it must be. A test that is not about
    that would fail on a machine that stands still for a second. The native engine would only pause for so long.
    """
    engine = engine or os.environ.get("DUALWRITE_PRODUCER_ENGINE", "native")
    return {**PATIENCE, **config} if engine == "librdkafka" else dict(config)


def wait_until(
    condition: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    otherwise: str | Callable[[], str] = "waited in vain",
    *,
    pause_s: float = 0.05,
) -> None:
    """Wait for a state that no event reports: of a process that is not our child, of a broker's partition.

    Asking without a pause would take the processor from what is waited for; so would a short one, where asking costs much.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, otherwise() if callable(otherwise) else otherwise
        time.sleep(pause_s)
