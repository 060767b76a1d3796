"""The log lines of a task while it writes."""

import json
import re
import subprocess
import sys

import pyarrow as pa
import pytest

from dualwrite.sinks.spark.per_partition import what_stays
from dualwrite.sinks.spark.writing import Progress

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


# One new process imports, and forks the others: that takes a second.
LOGGING = """
import json, logging, os, sys
from dualwrite.sinks.spark.writing import log_to_stderr
for environment, sets_up in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        os.environ |= environment
        if sets_up:
            logging.basicConfig(format="own %(message)s", level="INFO")
        log_to_stderr()
        log_to_stderr()
        logging.getLogger("dualwrite.sinks.x").info("one")
        log = logging.getLogger("dualwrite.x")
        log.info("three")
        log.warning("two")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print("---", file=sys.stderr)
"""


def test_a_process_beside_the_driver_logs_unless_somebody_has_set_up_logging():
    told = [
        ({}, False, ["INFO dualwrite.sinks.x: one", "WARNING dualwrite.x: two"]),
        ({"DUALWRITE_LOG": "warning"}, False, ["WARNING dualwrite.x: two"]),
        (
            {"DUALWRITE_LOG": "info"},
            False,
            ["INFO dualwrite.sinks.x: one", "INFO dualwrite.x: three", "WARNING dualwrite.x: two"],
        ),
        ({}, True, ["own one", "own three", "own two"]),
    ]
    cases = json.dumps([case[:2] for case in told])
    # Python warns of a fork beside threads from 3.12 on; libraries start some as they are imported.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", LOGGING, cases]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=600, check=True)
    lines = [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in done.stderr.splitlines()]
    assert lines == [line for *_, expected in told for line in [*expected, "---"]]


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
