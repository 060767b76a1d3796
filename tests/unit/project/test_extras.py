"""What needs an extra says which, and ``import dualwrite`` loads none of them."""

import subprocess
import sys

import pytest

HIDES = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["fastapi", "litestar", "faststream"])
def test_a_framework_that_is_missing_is_named_with_its_extra(name):
    done = run(HIDES.format(hidden={name}) + f"import dualwrite.frameworks.{name}")
    assert f"ImportError: No module named '{name}': pip install 'dualwrite[{name}]'" in done.stderr


def test_django_that_is_missing_is_named_with_its_extra():
    done = run(HIDES.format(hidden={"django"}) + "import dualwrite.django")
    assert "ImportError: No module named 'django': pip install 'dualwrite[django]'" in done.stderr


def test_openlineage_that_is_missing_is_named_with_its_extra():
    done = run(HIDES.format(hidden={"openlineage"}) + "import dualwrite.telemetry.lineage")
    assert "ImportError: No module named 'openlineage': pip install 'dualwrite[openlineage]'" in done.stderr


def test_an_import_of_the_library_loads_no_framework():
    names = {"django", "fastapi", "starlette", "litestar", "faststream", "openlineage", "cloudevents"}
    done = run(
        f"import sys, dualwrite; dualwrite.DualWriter; dualwrite.AsyncDualWriter; print({names!r} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr
