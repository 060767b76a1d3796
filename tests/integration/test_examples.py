"""Every application example runs without arguments and prints what it says it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

PRINTED = {
    "order_service.py": """\
placed order 1: 2 x tea
refused: 500 x cup
placed order 3: 1 x pot
rows:     {1: 'tea', 3: 'pot'}
messages: {1: 'tea', 3: 'pot'}
""",
    "startup_recovery.py": """\
killed after the database commit: rows [1], Kafka transaction Ongoing
recovered: ['payments'] rolled forward
rows [1], messages [1]
""",
    "kip939_recipe.py": """\
event 1: written; recovery: nothing was ongoing
event 2: killed before the decision; recovery: aborted
event 3: killed after the decision; recovery: committed
rows [1, 3], messages [1, 3]
""",
}


@pytest.mark.parametrize("example", PRINTED)
def test_example_prints_what_it_shows(example, dualwrite_kafka, dualwrite_postgres):
    servers = {
        "DUALWRITE_TEST_KAFKA": dualwrite_kafka.bootstrap_servers,
        "DUALWRITE_TEST_POSTGRES": dualwrite_postgres.url,
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)],
        env=os.environ | servers,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PRINTED[example]
