"""OpenTelemetry behind the observer port: spans, metrics, and the trace context in the headers of messages.

What belongs here: the names, and what is recorded when. May use: the interfaces, the protocol and
``opentelemetry``'s API, never its SDK.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Final

from dualwrite.interfaces import NO_OBSERVER, Observer

logger = logging.getLogger(__name__)

_API: Final = ("opentelemetry.trace", "opentelemetry.metrics")


def observer_if_loaded() -> Observer:
    """The process's :class:`Telemetry` with the global providers, if the application has imported OpenTelemetry's API."""
    return _global_telemetry() if any(name in sys.modules for name in _API) else NO_OBSERVER


@cache
def _global_telemetry() -> Observer:
    try:
        from dualwrite.telemetry.observer import Telemetry  # noqa: PLC0415 - needs the extra "telemetry"

        return Telemetry()
    except (ImportError, TypeError) as error:
        logger.warning(
            "nothing is recorded, as the installed opentelemetry-api is too old: install dualwrite[telemetry]: %s",
            error,
        )
        return NO_OBSERVER
