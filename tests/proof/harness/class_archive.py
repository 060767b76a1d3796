"""The classes that the broker's JVM loads, in a file: a broker that reads it starts with half the work.

``make archive`` makes it, by ``python -m harness.class_archive``. Where there is none, or one of other jars, brokers start without.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.servers import kafka as kafka_broker
from dualwrite.testing.servers.embedded import POM

ARCHIVE = Path(__file__).parents[3] / ".cache" / "broker.jsa"
OPTIONS = kafka_broker.JVM_OPTIONS
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def use() -> None:
    """Let the brokers that this process starts from now on read it, if there is one."""
    if ARCHIVE.exists():
        kafka_broker.JVM_OPTIONS = (*OPTIONS, *_reading())


def environment() -> dict[str, str]:
    """The environment in which processes of their own start such brokers, if there is the file. Other JVMs do without it."""
    return {"JAVA_TOOL_OPTIONS": shlex.join(_reading())} if ARCHIVE.exists() else {}


def make() -> None:
    """Learn the classes from a broker that does a little, if none has done so with these jars."""
    if ARCHIVE.exists() and ARCHIVE.stat().st_mtime > POM.stat().st_mtime:
        return
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(".new")
    kafka_broker.JVM_OPTIONS = (*OPTIONS, f"-XX:ArchiveClassesAtExit={unfinished}", *_QUIET)
    try:
        # A setting of its own: not the servers of the environment.
        with EmbeddedKafka({"auto.create.topics.enable": "false"}) as kafka:
            kafka.create_topic("any")
            kafka.stop()
    finally:
        kafka_broker.JVM_OPTIONS = OPTIONS
    unfinished.replace(ARCHIVE)


def _reading() -> tuple[str, ...]:
    return (f"-XX:SharedArchiveFile={ARCHIVE}", *_QUIET)


if __name__ == "__main__":
    make()
