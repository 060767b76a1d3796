"""The servers under the run: killed and stopped while processes work, and started again with their data."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres

if TYPE_CHECKING:
    from typing_extensions import Self

OPTIONS = "JAVA_TOOL_OPTIONS"


class Servers:
    """A broker and a PostgreSQL server of one's own. A context manager.

    Args:
        archive: Where the JVM keeps the classes that it has loaded, for a broker that is started hundreds of times.
    """

    def __init__(self, archive: Path | None = None) -> None:
        self._archive = archive
        self._closed_later = ExitStack()
        self.kafka = EmbeddedKafka()
        self.postgres = EmbeddedPostgres()
        self.outages: list[tuple[float, float]] = []
        self._away = 0
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        if self._archive is not None:
            self._learn_classes(self._archive)
        self._closed_later.enter_context(self.kafka)
        self._closed_later.enter_context(self.postgres)
        return self

    def _learn_classes(self, archive: Path) -> None:
        if not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            self._with_options(f"-XX:ArchiveClassesAtExit={archive}")
            with EmbeddedKafka() as learning:
                learning.create_topic("any")
                learning.stop(180)
        self._with_options(f"-XX:SharedArchiveFile={archive}")

    @staticmethod
    def _with_options(options: str) -> None:
        os.environ[OPTIONS] = f"{options} -Xlog:cds=off -Xlog:cds+dynamic=off"

    def __exit__(self, *_: object) -> None:
        self._closed_later.close()
        os.environ.pop(OPTIONS, None)

    def kill_broker(self) -> None:
        """SIGKILL the broker and start it again, with its data. Returns when it answers."""
        with self._outage():
            self.kafka.kill()
            self.kafka.start()

    def stop_database(self) -> None:
        """Stop PostgreSQL at once, without a checkpoint, and start it again."""
        with self._outage():
            self.postgres.restart("immediate")

    @contextmanager
    def _outage(self) -> Iterator[None]:
        began = time.monotonic()
        with self._changed:
            self._away += 1
        yield
        with self._changed:
            self._away -= 1
            self.outages.append((began, time.monotonic()))
            self._changed.notify_all()

    def wait_up(self, timeout_s: float) -> None:
        """Wait until all servers are there."""
        with self._changed:
            self._changed.wait_for(lambda: not self._away, timeout_s)

    def forget_logs(self) -> None:
        """Empty the logs of the servers: hundreds of starts fill them."""
        for process in (self.postgres._process, *(broker.process for broker in self.kafka._brokers)):
            os.truncate(process.log, 0)

    def were_up(self, since: float, until: float) -> bool:
        """Whether no server was away in between."""
        with self._changed:
            return not self._away and all(until < began or since > ended for began, ended in self.outages)
