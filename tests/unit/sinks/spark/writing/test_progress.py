"""The log lines of a task while it writes."""

import re
import subprocess
import sys

import pyarrow as pa
import pytest

from dualwrite.sinks.spark.per_partition.job import what_stays
from dualwrite.sinks.spark.writing.progress import Progress

BATCH = pa.RecordBatch.from_pydict({"id": pa.array(range(1000), pa.int64())})


def test_rows_and_bytes_are_counted_and_told(caplog):
    progress = Progress("partition 3", every_s=0)
    with caplog.at_level("INFO", "dualwrite"):
        progress.add(BATCH)
        progress.add(BATCH.slice(0, 500))
    assert (progress.rows, progress.bytes) == (1500, 1500 * 8)
    assert [record.getMessage().partition(" rows, ")[0] for record in caplog.records] == [
        "partition 3: writing, 1000",
        "partition 3: writing, 1500",
    ]


def test_nothing_is_told_before_it_is_time(caplog):
    with caplog.at_level("INFO", "dualwrite"):
        Progress("partition 3", every_s=3600).add(BATCH)
    assert not caplog.records


@pytest.mark.parametrize(
    ("before", "environment", "told"),
    [
        ("pass", {}, ["INFO dualwrite.sinks.x: one", "WARNING dualwrite.x: two"]),
        ("pass", {"DUALWRITE_LOG": "warning"}, ["WARNING dualwrite.x: two"]),
        (
            "pass",
            {"DUALWRITE_LOG": "info"},
            ["INFO dualwrite.sinks.x: one", "INFO dualwrite.x: three", "WARNING dualwrite.x: two"],
        ),
        ("logging.basicConfig(format='own %(message)s', level='INFO')", {}, ["own one", "own three", "own two"]),
    ],
)
def test_a_process_beside_the_driver_logs_unless_somebody_has_set_up_logging(before, environment, told):
    code = (
        "import logging; from dualwrite.sinks.spark.writing.progress import log_to_stderr\n"
        f"{before}\n"
        "log_to_stderr(); log_to_stderr()\n"
        "logging.getLogger('dualwrite.sinks.x').info('one')\n"
        "log = logging.getLogger('dualwrite.x'); log.info('three'); log.warning('two')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in done.stderr.splitlines()] == told


@pytest.mark.parametrize(
    ("written", "shown"),
    [([], "none of its 9"), ([3], "1 of its 9"), ([3], "(3)"), ([0, 1, 2, 4, 6, 7], "(0-2, 4, 6-7)")],
)
def test_a_failed_run_tells_which_partitions_stay(written, shown):
    assert shown in what_stays(written, 9)
    assert "commit more" not in what_stays(written, 9)
    unsure = what_stays(written, 9, given_up=False)
    assert shown in unsure
    assert "tasks that still run may commit more" in unsure
