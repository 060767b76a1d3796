"""Processes that are forked from one that has imported everything and has no threads: each costs no imports."""

from __future__ import annotations

import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess

import pytest


class _Process(ForkServerProcess):
    """A process with the environment of the moment it was made, not that of the server, which the first test started."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def processes() -> ForkServerContext:
    """The context that makes them. Each has the environment of its maker."""
    context = _Context()
    context.set_forkserver_preload(["pytest", "harness.worker", "scenarios.actor"])
    with pytest.MonkeyPatch.context() as patch:
        # The server does not learn of sys.path, and would import nothing, and say nothing.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context
