"""The classes that Spark's JVM loads, in a file: a JVM that reads it starts with half the work.

``make archive`` makes it, by ``python -m harness.spark_archive``. Where there is none, or one of other jars, Spark starts without.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyspark

ARCHIVE = Path(__file__).parents[3] / ".cache" / f"spark-{pyspark.__version__}.jsa"
_JARS = Path(pyspark.__file__).parent / "jars"
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")
_MAKES = "DUALWRITE_SPARK_ARCHIVE"


def options() -> tuple[str, ...]:
    """Options for a JVM to read the file, if there is one."""
    made = os.environ.get(_MAKES)
    if made:
        return (f"-XX:ArchiveClassesAtExit={made}", *_QUIET)
    return (f"-XX:SharedArchiveFile={ARCHIVE}", *_QUIET) if ARCHIVE.exists() else ()


def make() -> None:
    """Learn the classes from a session that does a little, if none has done so with these jars."""
    if ARCHIVE.exists() and ARCHIVE.stat().st_mtime > _JARS.stat().st_mtime:
        return
    ARCHIVE.parent.mkdir(exist_ok=True)
    unfinished = ARCHIVE.with_suffix(".new")
    os.environ[_MAKES] = str(unfinished)
    from harness.spark import numbers, session

    spark = session()
    process = spark.sparkContext._gateway.proc
    numbers(spark).repartition(2, "id").mapInArrow(_same, "id long, name string").count()
    spark.stop()
    process.stdin.close()
    process.wait()
    unfinished.replace(ARCHIVE)


def _same(batches):
    yield from batches


if __name__ == "__main__":
    make()
