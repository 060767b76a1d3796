"""Puts the reason of a failed job first: Spark buries it in a hundred lines of its own."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from dualwrite.errors import DualWriteError

logger = logging.getLogger(__name__)

_OURS: Final = re.compile(r"^(?:[\w.]*: )*dualwrite\.errors\.(\w+): (.+)$", re.MULTILINE)
_OTHER_PYTHON: Final = (
    (
        re.compile(r"No module named '(dualwrite|sqlalchemy|psycopg|pymysql|pgpq|confluent_kafka|kafka)"),
        "Spark's workers run a Python in which dualwrite[spark] is not installed: no module named {}",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\](.*)"),
        "Spark's workers run another version of Python than the driver:{}",
    ),
)
_RAISED: Final = re.compile(r"^  .*\n(\w\S*(?:: .*)?)$", re.MULTILINE)
"""The last line of a traceback: it follows an indented one."""
_CALLING: Final = "An error occurred while calling"
_SET_PYTHON: Final = (
    "let PYSPARK_PYTHON (spark.pyspark.python) name the driver's Python, or one of the same version with the same packages, "
    "on every machine"
)

_HIDES_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Spark's variable for ``spark.sql.execution.pyspark.udf.hideTraceback.enabled``; Spark reads it after an error has left us."""


JOB_ERRORS: Final = (PySparkException, Py4JJavaError)
"""The exceptions of a failed job; the call and the version of Spark decide which of them."""


class JobFailed(PySparkException):
    """A Spark job of this library failed, or was cancelled. ``__cause__`` is Spark's own exception.

    The first line is the reason; the second line says which partitions are committed.
    """


def reason_of(error: Exception) -> str:
    """The reason of a failed job, in one line: this library's error if there is one, otherwise what the task raised last.

    Args:
        error: Spark's exception. Its text includes the task's traceback.
    """
    text = str(error)
    for pattern, words in _OTHER_PYTHON:
        if found := pattern.search(text):
            return f"{words.format(found[1])} ({_SET_PYTHON})"
    if ours := _OURS.findall(text):
        return "{}: {}".format(*ours[-1])
    if raised := _RAISED.findall(text):
        return str(raised[-1])
    told = (line.removeprefix(": ") for line in text.splitlines() if line and not line.startswith(_CALLING))
    return next(told, type(error).__name__)


@contextmanager
def without_cause() -> Generator[None, None, None]:
    """Leave an error's causes to the log. A stream's own exception shows them all as text, and before the error itself.

    Raises:
        JobFailed, DualWriteError: The block's, without its cause.
    """
    try:
        yield
    except (JobFailed, DualWriteError) as error:
        logger.exception("traceback of the error that the stream shows")
        raise error from None


@contextmanager
def shown_first() -> Generator[None, None, None]:
    """In a process of Spark's that ends with the block's error: let Spark show the error without a traceback before it.

    The traceback goes to the log. Errors that are not this library's stay as they are.
    """
    try:
        yield
    except DualWriteError:
        logger.exception("the traceback of the error that Spark shows")
        # Harmless: a process that fails with an error runs nothing more, even if Spark reuses others.
        os.environ[_HIDES_TRACEBACK] = "1"
        raise
