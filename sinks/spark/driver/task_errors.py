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
        re.compile(r"No module named '(dualwrite|sqlalchemy|psycopg|pgpq|confluent_kafka|kafka)"),
        "Spark's workers run a Python in which dualwrite[spark] is not installed: no module named {}",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\](.*)"),
        "Spark's workers run another version of Python than the driver:{}",
    ),
)
_SET_PYTHON: Final = (
    "let PYSPARK_PYTHON (spark.pyspark.python) name the driver's Python, or one of the same version with the same packages, "
    "on every machine"
)

_HIDES_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""Spark's variable for ``spark.sql.execution.pyspark.udf.hideTraceback.enabled``; Spark reads it after an error has left us."""


class JobFailed(PySparkException):
    """A Spark job failed for a reason that this library knows. ``__cause__`` is Spark's own exception."""


def told_by_task(text: str) -> str | None:
    """The reason in the text of Spark's exception, in one line; None if it is not one of this library's errors.

    Args:
        text: The exception's text, which includes the task's traceback.
    """
    for pattern, words in _OTHER_PYTHON:
        if found := pattern.search(text):
            return f"{words.format(found[1])} ({_SET_PYTHON})"
    errors = _OURS.findall(text)
    return "{}: {}".format(*errors[-1]) if errors else None


@contextmanager
def named_failures(name: str) -> Generator[None, None, None]:
    """Make the error of a failed job begin with its reason.

    Args:
        name: Names the job in the error.

    Raises:
        JobFailed: In place of Spark's exception, if the reason is known.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        reason = told_by_task(str(error))
        if reason is None:
            raise
        raise JobFailed(f"{name}: {reason}") from error


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
