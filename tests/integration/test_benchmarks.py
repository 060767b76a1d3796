"""The benchmarks run to their end on little data: a change of what they call shows here, and not hours into a measurement."""

import os
import subprocess
import sys

import pytest
from harness.patience import PATIENCE_S
from harness.places import PROOF, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(("module", "page"), [("benchmarks", "bench"), ("benchmarks.spark", "bench-spark")])
def test_every_part_is_measured_once_on_little_data(module, page):
    done = subprocess.run(
        [sys.executable, "-m", module, "--small"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(PROOF)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"written: {page}/benchmarks.md" in done.stdout
