"""What needs an extra says which, and ``import dualwrite`` loads none of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]
HIDES = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
WRITER = """
from dualwrite import {name}
{name}("orders", kafka={{"bootstrap.servers": "localhost:9"}}, database="{url}")
"""
REGISTRY = {"attr", "attrs", "authlib", "cachetools", "certifi", "fastavro", "google", "httpx", "httpx2", "jsonschema"}
USES = [
    ("postgresql", "psycopg", WRITER.format(name="DualWriter", url="postgresql+psycopg://localhost/shop")),
    ("mariadb", "pymysql", WRITER.format(name="DualWriter", url="mysql+pymysql://localhost/shop")),
    ("mysqlclient", "MySQLdb", WRITER.format(name="DualWriter", url="mysql+mysqldb://localhost/shop")),
    ("async", "greenlet", "from dualwrite import AsyncDualWriter"),
    ("async", "greenlet", "from dualwrite.testing import AsyncInMemoryWriter"),
    ("async", "aiosqlite", WRITER.format(name="AsyncDualWriter", url="sqlite:///shop.db")),
    ("async", "aiosqlite", "from dualwrite.testing import AsyncInMemoryWriter; AsyncInMemoryWriter()"),
    ("asyncpg", "asyncpg", WRITER.format(name="AsyncDualWriter", url="postgresql+asyncpg://localhost/shop")),
    ("cli", "click", "from dualwrite.cli import main; main()"),
    (
        "serve",
        "uvicorn",
        f"import dualwrite.cli; sys.argv[1:] = ['serve', '--config', {__file__!r}]; dualwrite.cli.main()",
    ),
    ("spark", "pyspark", "import dualwrite.sinks.spark"),
    ("spark", "pyarrow", "from dualwrite.sinks.spark import write_batch"),
    (
        "schema-registry",
        "certifi",
        "from dualwrite.sinks.spark.schema_parts import Format, module_of; module_of(Format.AVRO)",
    ),
    ("rocksdb", "rocksdict", "from dualwrite.databases import RocksDatabase; RocksDatabase('no-such-directory')"),
    ("state", "rocksdict", "from dualwrite.state import KeyValueStore; KeyValueStore('no-such-directory')"),
    ("state", "sortedcontainers", "from dualwrite.state import KeyValueStore; KeyValueStore('no-such-directory')"),
    ("telemetry", "opentelemetry", "from dualwrite import Telemetry"),
    ("zookeeper", "kazoo", "from dualwrite.databases import ZooKeeperDatabase"),
    ("django", "django", "import dualwrite.django"),
    ("fastapi", "fastapi", "import dualwrite.frameworks.fastapi"),
    ("litestar", "litestar", "import dualwrite.frameworks.litestar"),
    ("faststream", "faststream", "import dualwrite.frameworks.faststream"),
    ("openlineage", "openlineage", "import dualwrite.telemetry.lineage"),
    ("testing", "psycopg", "from dualwrite.testing import EmbeddedPostgres"),
]


def run(code, hidden=()):
    code = HIDES.format(hidden=set(hidden)) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def extras_of_users():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return set(settings["project"]["optional-dependencies"]) - {"dev", "docs"}


@pytest.mark.parametrize(("extra", "hidden", "code"), USES)
def test_a_package_that_is_missing_is_named_with_its_extra(extra, hidden, code):
    done = run(code, {hidden})
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0
    assert hidden in last
    assert f"pip install 'dualwrite[{extra}]'" in last


def test_every_extra_is_named_by_an_error():
    assert {extra for extra, _, _ in USES} == extras_of_users()


def test_the_readme_lists_every_extra():
    [line] = re.findall(r"^Extras: (.*)\.$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.findall(r"`([a-z-]+)`", line)
    assert sorted(listed) == sorted(extras_of_users())


def test_a_spark_sink_without_schemas_needs_no_schema_registry():
    done = run("import dualwrite.sinks.spark, dualwrite.sinks.spark.writing", REGISTRY)
    assert done.returncode == 0, done.stderr


def test_a_connection_of_sqlite_is_closed_without_greenlet():
    done = run(
        "from sqlalchemy import create_engine\n"
        "from dualwrite.stores.sql.drivers import roll_back_before_closing\n"
        "engine = create_engine('sqlite://')\n"
        "roll_back_before_closing(engine)\n"
        "engine.connect().invalidate()\n",
        {"greenlet"},
    )
    assert done.returncode == 0, done.stderr


def test_an_import_of_the_library_loads_no_framework():
    names = {"django", "fastapi", "starlette", "litestar", "faststream", "openlineage", "cloudevents"}
    done = run(
        f"import sys, dualwrite; dualwrite.DualWriter; dualwrite.AsyncDualWriter; print({names!r} & set(sys.modules))"
    )
    assert done.stdout.strip() == "set()", done.stderr
