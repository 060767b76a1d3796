"""The wheel that users install: everything that the source tree has, and every public name."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"dualwrite": "dualwrite", "sinks": "dualwrite/sinks", "migrations": "dualwrite/migrations"}
DISCOVERY = ROOT / "sinks" / "spark_discovery"
PUBLIC = """
import importlib
PACKAGES = (
    "dualwrite", "dualwrite.sinks.spark", "dualwrite.state", "dualwrite.testing", "dualwrite.units", "dualwrite.migrations"
)
for package in PACKAGES:
    module = importlib.import_module(package)
    assert module.__file__.startswith({site!r}), module.__file__
    for name in module.__all__:
        getattr(module, name)
import pyspark_dualwrite
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    made = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", made, ROOT]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(made.glob("*.whl"))


def sources():
    for folder, place in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".html", ".py", ".xml", ".typed"}:
                if path.is_relative_to(DISCOVERY):
                    yield f"pyspark_dualwrite/{path.relative_to(DISCOVERY)}"
                else:
                    yield f"{place}/{path.relative_to(ROOT / folder)}"


def test_the_wheel_has_every_file_of_the_source_tree_and_no_other(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == set(sources())


def test_the_wheel_stays_small(wheel):
    """Think before you raise it: everybody downloads what few need."""
    assert wheel.stat().st_size < 1_200_000


def test_every_public_name_is_importable_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + PUBLIC.format(site=str(tmp_path)),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
