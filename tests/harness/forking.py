"""Processes that are forked from one that has imported everything and has no threads: each costs no imports."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def processes() -> ForkServerContext:
    """What makes them. They have the environment of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "harness.worker", "scenarios.actor"])
    return context
