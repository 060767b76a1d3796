"""Sends what a producer holds back, whichever engine it has, without preparing the transaction."""

from __future__ import annotations

from typing import Any

from dualwrite.clock import Deadline
from dualwrite.kafka.native.producer import NativeInstance


def flush(producer: Any, timeout_s: float) -> None:
    """Everything that was produced is in the brokers' logs on return."""
    instance = producer._instance
    if isinstance(instance, NativeInstance):
        assert instance._sender.flush(Deadline(timeout_s))
    else:
        assert instance._raw.flush(timeout_s) == 0
