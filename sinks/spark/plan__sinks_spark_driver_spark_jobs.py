"""The Spark jobs of one batch: cancelled, and awaited until none of their tasks runs any more.

For Spark's caller, a failed job is over while its other tasks still run. Until they end, they hold the locks of the rows
that they have copied.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError

from dualwrite.clock import Deadline, pause

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)

CONNECT: Final = "pyspark.sql.connect"
"""Where the classes of Spark Connect stand, which has no driver in this process."""
_LOOKS_AGAIN_S: Final = 0.05


class SparkJobs:
    """Jobs that this process has started, recognised by a tag of their own.

    Args:
        context: Where they run.
    """

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._tag = f"dualwrite-{secrets.token_hex(8)}"

    @contextmanager
    def started(self) -> Generator[None, None, None]:
        """Count the jobs that this thread starts in the block as ours."""
        self._context.addJobTag(self._tag)
        try:
            yield
        finally:
            self._context.removeJobTag(self._tag)

    def end(self, name: str, deadline: Deadline) -> None:
        """Cancel running jobs, and wait until none of their tasks runs. Raises nothing: a failure of Spark must not stop us.

        Args:
            name: For the log.
            deadline: Limits the wait.
        """
        try:
            self._context.cancelJobsWithTag(self._tag)
            while running := self._running():
                if deadline.expired:
                    logger.warning("%s: %d tasks still run, and may hold locks", name, running)
                    return
                pause(_LOOKS_AGAIN_S)
        except Py4JError as error:  # usually, because Spark itself has ended
            logger.warning(
                "%s: cannot find out from Spark whether its tasks have ended: %s", name, type(error).__name__
            )

    def _running(self) -> int:
        # Not PySpark's own tracker: it knows no tags, and makes a list for each stage.
        tracker = self._context._jsc.sc().statusTracker()  # noqa: SLF001 - as PySpark's own tracker does
        running = 0
        for job in tracker.getJobIdsForTag(self._tag):
            found = tracker.getJobInfo(job)
            for stage in found.get().stageIds() if found.isDefined() else ():
                shown = tracker.getStageInfo(stage)
                running += shown.get().numActiveTasks() if shown.isDefined() else 0
        return running
