"""Processes that are forked from one that has imported everything and has no threads: each costs no imports."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

import pytest


def processes() -> ForkServerContext:
    """The context that makes them. They have the environment of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "harness.worker", "scenarios.actor"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not learn of sys.path, and would import nothing, and say nothing.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context
