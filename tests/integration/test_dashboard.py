"""Every expression of the dashboard and of the alert rules, asked of a real Prometheus that scrapes a service and applications."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from contextlib import ExitStack, closing

import pytest
import yaml
from harness.checker import Case
from harness.patience import PATIENCE_S, wait_until
from harness.places import ROOT

OPERATIONS = ROOT / "examples" / "operations"
PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.parametrize("url", ["postgresql"], indirect=True),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt install prometheus"),
]

EMPTY_IN_HEALTH = {
    "dualwrite_transaction_time_left_seconds": "a block of this application is open for milliseconds",
    "dualwrite_outbox_fallbacks_total": "Kafka answers, so no block falls back",
    "dualwrite_group_units_bucket": "this application calls no submit",
}
"""What an expression with this metric waits for, which a healthy system does not have."""


def expressions():
    board = json.loads((OPERATIONS / "grafana" / "dualwrite.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    for name, value in (("$target", ".*"), ("$writer", ".*"), ("$__rate_interval", "30s")):
        asked = [one.replace(name, value) for one in asked]
    assert not [one for one in asked if "$" in one]
    return asked


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return found.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Starts processes, which are ended after the test; returns one with the file of what it says."""
    with ExitStack() as later:

        def run(name, *command, **environment):
            log = tmp_path / f"{name}.log"
            with log.open("w") as out:
                process = subprocess.Popen(
                    command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
                )
            later.callback(process.wait, PATIENCE_S)
            later.callback(process.terminate)
            return process, log

        yield run


def address(process, log):
    """Where it listens, once it says so."""

    def said():
        assert process.poll() is None, log.read_text()
        return re.search(r"listening on http://(127\.0\.0\.1:\d+)", log.read_text())

    wait_until(said, otherwise=log.read_text)
    return said()[1]


@pytest.fixture
def ask(tmp_path, start, kafka, url, engine, dualwrite_topic):
    """Puts a query to a Prometheus that scrapes a service and two applications, beside one that died after its decision."""
    for name in ("dead", "orders-0"):
        (tmp_path / name).mkdir()
        Case(tmp_path / name, kafka, url, dualwrite_topic, name).run(failpoint="write.decided:2", killed=True)
    applications = [
        start(
            name,
            sys.executable,
            str(OPERATIONS / "application" / "orders.py"),
            DATABASE_URL=url,
            BOOTSTRAP_SERVERS=kafka["bootstrap.servers"],
            TOPIC=dualwrite_topic,
            WRITER=name,
            OUTBOX=outbox,
            PAUSE_S="0.2",
            LISTEN="127.0.0.1:0",
        )
        for name, outbox in (("orders-0", "fallback"), ("mails-0", "always"))
    ]
    file = tmp_path / "serve.toml"
    file.write_text(
        f'listen = "127.0.0.1:0"\ninterval_s = 1\nsettle_after_s = 600\n[target.shop]\nurl = "{url}"\n'
        f'kafka.bootstrap.servers = "{kafka["bootstrap.servers"]}"\n'
    )
    service = start(
        "serve", sys.executable, "-c", "from dualwrite.cli import main; main()", "serve", "--config", str(file)
    )
    places = [address(*one) for one in (service, *applications)]
    configuration = tmp_path / "prometheus.yml"
    scrapes = [
        {"job_name": "dualwrite-serve", "static_configs": [{"targets": places[:1]}]},
        {"job_name": "orders", "static_configs": [{"targets": places[1:]}]},
    ]
    rules = str(OPERATIONS / "prometheus" / "dualwrite.rules.yaml")
    configuration.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": [rules],
                "scrape_configs": scrapes,
            }
        )
    )
    port = free_port()
    process, log = start(
        "prometheus",
        PROMETHEUS,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )

    def answer(path, **query):
        asked = f"http://127.0.0.1:{port}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as found:
            return json.load(found)["data"]

    def ready():
        assert process.poll() is None, log.read_text()
        return "Server is ready to receive web requests" in log.read_text()

    wait_until(ready, otherwise=log.read_text)
    wait_until(lambda: [one["health"] for one in answer("api/v1/targets")["activeTargets"]] == ["up"] * 3)
    return answer


def test_every_expression_of_the_dashboard_and_of_the_rules_finds_what_it_asks_for(ask):
    def result(expression):
        return ask("api/v1/query", query=expression)["result"]

    def is_expected(expression):
        return not any(metric in expression for metric in EMPTY_IN_HEALTH)

    asked = expressions()
    assert len(asked) > 30
    empty = [one for one in asked if is_expected(one)]

    def all_found():
        empty[:] = [one for one in empty if not result(one)]
        return not empty

    wait_until(all_found, 120.0, otherwise=lambda: f"no data for {empty}")
    left_out = [one for one in asked if not is_expected(one)]
    assert len(left_out) == len(EMPTY_IN_HEALTH)
    assert [one for one in left_out if "time_left" not in one and result(one)] == [], "it need not be left out"
    outcomes = {one["metric"]["dualwrite_outcome"] for one in result("dualwrite_writes_total")}
    assert outcomes == {"committed", "waiting"}

    # The rules were evaluated without an error. What died after its decision is all that calls, once it is old enough.
    groups = ask("api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    expected = yaml.safe_load((OPERATIONS / "prometheus" / "dualwrite.rules.yaml").read_text(encoding="utf-8"))[
        "groups"
    ]
    assert [rule["name"] for rule in rules] == [rule["alert"] for group in expected for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    pending = {rule["name"] for rule in rules if rule["state"] != "inactive"}
    assert pending <= {"DualwriteDecidedNotCompleted", "DualwriteOpenTooLong", "DualwriteLateTransactions"}
