"""Processes that are forked: from one that has imported everything and has no threads, so that each costs no imports; or inside
a block of a dual write."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
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
    context.set_forkserver_preload(
        ["pytest", "harness.worker", "scenarios.actor", "dualwrite.cli.serve", "dualwrite.serving.app"]
    )
    with pytest.MonkeyPatch.context() as patch:
        # The server does not learn of sys.path, and would import nothing, and say nothing.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


class ChildEnds(Exception):
    """Takes a forked process out of the blocks that it was forked in."""


@contextmanager
def parents_alone() -> Generator[None, None, None]:
    """Only the parent leaves this block: a forked process ends here, with the class of its exception for :func:`ended_by`."""
    parent = os.getpid()
    reading, writing = os.pipe()
    _pipes[parent] = reading
    try:
        try:
            yield
        finally:
            if os.getpid() != parent:
                os.write(writing, type(sys.exc_info()[1]).__name__.encode())
                os._exit(0)
    finally:
        os.close(reading)
        os.close(writing)


_pipes: dict[int, int] = {}


def ended_by(child: int) -> str:
    """The class of the exception with which a forked process has reached the end of :func:`parents_alone`."""
    os.waitpid(child, 0)
    return os.read(_pipes[os.getpid()], 100).decode()
