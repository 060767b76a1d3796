"""The recipes of docs/orchestrators.md, in Airflow and Dagster themselves. `make orchestrators` makes their environments."""

import json
import os
import subprocess
import sys

import pytest
from harness.orders import on_postgresql, write
from harness.page_examples import example
from harness.places import ROOT
from sqlalchemy import text

from dualwrite import DualWriter, recover
from dualwrite.protocol.batches import Destination, Way
from dualwrite.stores.sql.ledger import WHOLE_BATCH, Ledger

pytestmark = on_postgresql

COUNTS = {"row_count": 10, "message_count": 10, "partition_count": 1}


def python_of(name):
    found = ROOT / ".cache" / name / "bin" / "python"
    if not found.exists():
        pytest.skip(f"{name} is not installed: `make orchestrators` makes its environment")
    return found


def run(python, code, tmp_path, **environment):
    file = tmp_path / "recipe.py"
    file.write_text(code, encoding="utf-8")
    return subprocess.run(
        [python, file],
        env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip


@pytest.fixture
def batch(engine):
    """Takes a batch of a sink to its phases, as a sink does."""
    ledger, destination = Ledger(), Destination(Way.WHOLE, "orders", "orders", "cluster")

    def take(phase):
        if phase == "writing":
            ledger.begin(engine, "flights", "day-1", destination)
        elif phase == "failed":
            ledger.fail(engine, "flights", "day-1")
        elif phase == "decided":
            with engine.begin() as connection:
                ledger.begin(connection, "flights", "day-1", destination)
                ledger.insert(connection, "flights", "day-1", WHOLE_BATCH, **COUNTS)
        else:
            ledger.complete(engine, "flights", "day-1", WHOLE_BATCH)

    return take


POKES = """
URL = {url!r}
{sensor}
sensor = BatchSensor(task_id="written", url=URL, sink="flights", batch_id="day-1")
try:
    print("RESULT", sensor.poke({{}}))
except RuntimeError as error:
    print("RESULT", error)
"""

WHOLE_DAG = """
URL = {url!r}
{sensor}
{dag}
if __name__ == "__main__":
    dag = written.dag
    run = dag.test(run_conf={{"day": "day-1"}})
    print("RESULT", run.state, {{one.task_id: one.state for one in run.get_task_instances()}})
"""


def result(done):
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert (done.returncode, bool(lines)) == (0, True), done.stdout + done.stderr
    return lines[-1]


@pytest.fixture
def airflow(tmp_path):
    """Airflow's Python, and the variables of a home of its own, whose database is made once."""
    python = python_of("airflow")
    home = ROOT / ".cache" / "airflow-home"
    return python, {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path),
    }


def test_the_sensor_waits_until_both_sides_have_the_batch(airflow, url, batch, tmp_path):
    python, environment = airflow
    sensor = example("orchestrators.md", "Airflow: wait for a batch")[0]

    def poke():
        return result(run(python, POKES.format(url=url, sensor=sensor), tmp_path, **environment))

    assert poke() == "False"
    batch("writing")
    assert poke() == "False"
    batch("failed")
    assert "has failed: run its job again" in poke()
    batch("decided")
    assert poke() == "False"
    batch("completed")
    assert poke() == "True"


def test_the_dag_runs_to_its_end(airflow, url, batch, tmp_path):
    python, environment = airflow
    sensor, dag = example("orchestrators.md", "Airflow: wait for a batch")
    batch("decided")
    batch("completed")
    code = WHOLE_DAG.format(url=url, sensor=sensor, dag=dag)
    found = result(run(python, code, tmp_path, **environment))
    assert found.startswith("success"), found
    assert "'written': 'success'" in found.replace("<TaskInstanceState.SUCCESS: 'success'>", "'success'")


LOST = text(
    "INSERT INTO dualwrite_incident (transactional_id, state_sha256, prepared_transaction_state, outcome, detail) "
    "VALUES ('shop', 'x', '', 'lost', 'd')"
)
CHECK = """
KAFKA, URL = {kafka!r}, {url!r}
{check}
if __name__ == "__main__":
    import json
    from dagster import materialize
    done = materialize([orders, both_sides_agree], raise_on_error=False)
    (found,) = done.get_asset_check_evaluations()
    print("RESULT", json.dumps([found.passed, found.metadata["unsettled"].value, found.metadata["lost"].value]))
"""


def test_the_check_passes_only_if_nothing_waits_for_a_recovery_and_each_loss_is_acknowledged(
    url, kafka, engine, dualwrite_topic, orders, tmp_path
):
    python = python_of("dagster")
    (check,) = example("orchestrators.md", "Dagster: check an asset")
    code = CHECK.format(kafka=dict(kafka), url=url, check=check)

    def checked():
        home = tmp_path / "dagster"
        home.mkdir(exist_ok=True)
        return json.loads(result(run(python, code, tmp_path, DAGSTER_HOME=str(home), DAGSTER_DISABLE_TELEMETRY="1")))

    with DualWriter("shop", kafka=kafka, database=engine) as writer:
        write(writer, dualwrite_topic, orders, 1)
    assert checked() == [True, [], []]
    leave_decided(url, kafka, dualwrite_topic)
    assert checked()[0] is False
    recover("shop", kafka=kafka, database=engine)
    assert checked() == [True, [], []]
    with engine.begin() as connection:
        connection.execute(LOST)
    assert checked() == [False, [], ["shop"]]
    with engine.begin() as connection:
        connection.execute(text("UPDATE dualwrite_incident SET acknowledged_at = now()"))
    assert checked() == [True, [], []]


def leave_decided(url, kafka, topic):
    """A process that dies between its two commits."""
    code = f"""
from dualwrite import DualWriter
writer = DualWriter("shop", kafka={dict(kafka)!r}, database={url!r})
writer.open()
with writer.transaction() as tx:
    tx.produce({topic!r}, "2")
"""
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "DUALWRITE_FAILPOINT": "write.decided"}, check=False
    )
