"""A Spark driver in a process of its own, which runs what a test asks it to: a process has one session, and one way to it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor

from pyspark.sql import SparkSession

from harness.patience import PATIENCE_S


class Failed(Exception):
    """The error that a function in the driver process raised, as text: Spark's own errors do not pickle."""


class DriverProcess:
    """The process. A context manager.

    Attributes:
        pid: Its id.

    Args:
        begin: Called in it at first, and makes a session.
        arguments: What for.
    """

    def __init__(self, begin: Callable[..., None], *arguments: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=begin, initargs=arguments)

    def __enter__(self):
        self.pid = self._pool.submit(os.getpid).result(PATIENCE_S)
        return self

    def __exit__(self, *_):
        self.run(_stop)
        self._pool.shutdown()

    def start(self, function, *arguments, **named) -> Future:
        """Run a function in the process; it must be one that another process can import."""
        return self._pool.submit(_called, function, *arguments, **named)

    def run(self, function, *arguments, **named):
        """As :meth:`start`, and wait.

        Raises:
            Failed: It has failed.
        """
        return self.start(function, *arguments, **named).result(PATIENCE_S)


def _called(function, *arguments, **named):
    try:
        return function(*arguments, **named)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the test
        raise Failed(f"{type(error).__name__}: {error}") from None


def _stop() -> None:
    SparkSession.active().stop()
