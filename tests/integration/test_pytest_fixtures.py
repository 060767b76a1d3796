"""The pytest fixtures as a user's own project has them."""

import os
import re
import subprocess
import sys

from harness.places import ROOT


def test_the_code_of_the_page_runs(kafka, dualwrite_postgres, tmp_path):
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    [code] = [
        one
        for one in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        if "dualwrite_writer" in one
    ]
    (tmp_path / "test_orders.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={
            **os.environ,
            "DUALWRITE_TEST_KAFKA": kafka["bootstrap.servers"],
            "DUALWRITE_TEST_POSTGRES": dualwrite_postgres.url,
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
