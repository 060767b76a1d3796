"""The classes that the broker's JVM loads, in a file: a broker that reads it starts with half the work.

``make archive`` makes it, by ``python -m harness.class_archive``. Where there is none, or one of other jars, brokers start without.
"""

from __future__ import annotations

from pathlib import Path

from dualwrite.testing import EmbeddedKafka
from dualwrite.testing.servers import kafka_broker
from dualwrite.testing.servers.jars import POM

ARCHIVE = Path(__file__).parents[2] / ".cache" / "broker.jsa"
OPTIONS = kafka_broker.JVM_OPTIONS


def use() -> None:
    """Let the brokers that this process starts from now on read it, if there is one."""
    if ARCHIVE.exists():
        _give(f"-XX:SharedArchiveFile={ARCHIVE}")


def make() -> None:
    """Learn the classes from a broker that does a little, if none has done so with these jars."""
    if ARCHIVE.exists() and ARCHIVE.stat().st_mtime > POM.stat().st_mtime:
        return
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(".new")
    _give(f"-XX:ArchiveClassesAtExit={unfinished}")
    try:
        # A setting of its own: not the servers of the environment.
        with EmbeddedKafka({"auto.create.topics.enable": "false"}) as kafka:
            kafka.create_topic("any")
            kafka.stop()
    finally:
        kafka_broker.JVM_OPTIONS = OPTIONS
    unfinished.replace(ARCHIVE)


def _give(option: str) -> None:
    kafka_broker.JVM_OPTIONS = (*OPTIONS, option, "-Xlog:cds=off", "-Xlog:cds+dynamic=off")


if __name__ == "__main__":
    make()
