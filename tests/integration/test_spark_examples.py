"""Every Spark example runs without arguments and prints what it says it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import PATIENCE_S
from harness.spark import environment

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = {
    "spark_batch.py": """\
first run: 336776 rows written, 336776 in all
second run: 0 rows written, 336776 in all
rows: 336776, messages: 336776, equal: True
""",
    "spark_stream.py": """\
killed: 20000 rows
started again: 30000 rows, 30000 messages, equal: True
""",
}


@pytest.mark.longest
@pytest.mark.parametrize("example", [pytest.param("spark_batch.py", marks=pytest.mark.thorough), "spark_stream.py"])
def test_example_prints_what_it_shows(example, dualwrite_kafka, dualwrite_postgres):
    servers = {
        "DUALWRITE_TEST_KAFKA": dualwrite_kafka.bootstrap_servers,
        "DUALWRITE_TEST_POSTGRES": dualwrite_postgres.url,
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env=os.environ | environment() | servers,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout == PRINTED[example]


@pytest.mark.thorough
@pytest.mark.longest
def test_the_demonstration_ends_with_both_sides_equal():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--kills", "1"],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("killed after") == 1
    assert "Both sides are equal, row for row" in done.stdout
