"""The reason of a failed job, found in what Spark shows of it."""

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from dualwrite.sinks.spark.plan import reason_of

SHOWN = """\
An error occurred while calling o81.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/python/dualwrite/sinks/spark/copying.py", line 97, in copying
psycopg.errors.UniqueViolation: duplicate key value

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/python/dualwrite/sinks/spark/per_partition/task.py", line 97, in _write
    raise map_database_error(error) from error
dualwrite.errors.TransactionAborted: sink#1: table 'orders' does not take the rows (nothing was written on either side)

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
"""


OURS = "dualwrite.errors.TransactionAborted: sink#1: table 'orders' does not take the rows (nothing was written on either side)"
REASON = OURS.removeprefix("dualwrite.errors.")


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (SHOWN, REASON),
        (SHOWN.replace(OURS, "my.own.Error: no such flight: 7"), "my.own.Error: no such flight: 7"),
        (SHOWN.replace(OURS, "KeyError"), "KeyError"),
        ("[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012\n\n== DataFrame ==\n", "[DIVIDE_BY_ZERO] Division by zero. SQLSTATE: 22012"),
        ("An error occurred while calling o81.run.\n: org.apache.spark.SparkException: Job 3 cancelled\n\tat org.apache", "org.apache.spark.SparkException: Job 3 cancelled"),
        ("", "PySparkException"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failed_job_is_what_its_task_has_raised_last(shown, reason):
    assert reason_of(PySparkException(message=shown)) == reason


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        ("ModuleNotFoundError: No module named 'dualwrite'", "dualwrite[spark] is not installed"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", "another version of Python"),
    ],
)
def test_workers_of_another_python_are_named_with_the_setting(shown, says):
    reason = reason_of(PySparkException(message=f"Traceback\n{shown}\n at org.apache.spark"))
    assert says in reason
    assert "PYSPARK_PYTHON" in reason
    assert "\n" not in reason
