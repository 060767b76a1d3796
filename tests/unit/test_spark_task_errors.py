"""The reason of a failed job, found in what Spark shows of it."""

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException

from dualwrite.sinks.spark.driver.task_errors import JobFailed, named_failures, told_by_task

SHOWN = """An error occurred while calling o81.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/python/dualwrite/sinks/spark/copying.py", line 97, in copying
psycopg.errors.UniqueViolation: duplicate key value

The above exception was the direct cause of the following exception:

dualwrite.errors.TransactionAborted: sink#1: table 'orders' does not take the rows (nothing was written on either side)

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
"""


def test_the_reason_of_a_task_is_the_first_line():
    with pytest.raises(JobFailed) as caught, named_failures("sink 's' batch '1'"):
        raise PySparkException(message=SHOWN)
    assert str(caught.value).splitlines()[0] == (
        "sink 's' batch '1': TransactionAborted: sink#1: table 'orders' does not take the rows "
        "(nothing was written on either side)"
    )
    assert isinstance(caught.value.__cause__, PySparkException)


def test_what_is_not_ours_stays_as_it_is():
    with pytest.raises(PySparkException, match="^ValueError: boom$") as caught, named_failures("sink 's' batch '1'"):
        raise PySparkException(message="ValueError: boom")
    assert not isinstance(caught.value, JobFailed)


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        ("ModuleNotFoundError: No module named 'dualwrite'", "dualwrite[spark] is not installed"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", "another version of Python"),
    ],
)
def test_workers_of_another_python_are_named_with_the_setting(shown, says):
    reason = told_by_task(f"Traceback\n{shown}\n at org.apache.spark")
    assert says in reason
    assert "PYSPARK_PYTHON" in reason
    assert "\n" not in reason
