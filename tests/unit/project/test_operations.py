"""What people take to their own Prometheus, Grafana and cluster: it is well-formed, and names only what there is."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jsonschema
import kubernetes_validate
import pytest
import yaml
from harness.places import ROOT
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider

from dualwrite.serving.app import exposition
from dualwrite.serving.configuration import parse_settings
from dualwrite.serving.supervisor import Snapshot
from dualwrite.telemetry import names
from dualwrite.telemetry.names import Instrument

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPERATIONS = ROOT / "examples" / "operations"
RULES = OPERATIONS / "prometheus" / "dualwrite.rules.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
SECTIONS = ["What it means", "What is at risk", "What to look at", "What to do", "When it ends"]
NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
)


def rules():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_in(expression):
    """The metrics of an expression: its words, without the names of labels."""
    bare = re.sub(r"\{[^}]*}|\b(by|on|without|ignoring|group_left|group_right) *\([^)]*\)", "", expression)
    return set(re.findall(r"\b(?:dualwrite|messaging|otel)_\w+", bare))


def exported_by_the_service():
    shown = exposition([SimpleNamespace(snapshot=Snapshot("shop"))]).decode()
    return {line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE ")}


def exported_by_writers():
    """The names that OpenTelemetry's exporter makes of the declared ones, without any of the present process's own."""
    provider = MeterProvider([reader := PrometheusMetricReader()])
    meter = provider.get_meter("names")
    for one in names.METRICS:
        attributes = dict.fromkeys(one.attributes, "x")
        if one.instrument is Instrument.COUNTER:
            meter.create_counter(one.name, one.unit).add(1, attributes)
        elif one.instrument is Instrument.HISTOGRAM:
            meter.create_histogram(one.name, one.unit).record(1, attributes)
        elif one.instrument is Instrument.GAUGE:
            meter.create_gauge(one.name, one.unit).set(1, attributes)
        else:
            meter.create_up_down_counter(one.name, one.unit).add(1, attributes)
    try:
        return {sample.name for family in reader._collector.collect() for sample in family.samples}
    finally:
        provider.shutdown()


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RULES.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_the_rules_are_well_formed():
    run("promtool", "check", "rules", RULES.name)


@NEEDS_PROMTOOL
def test_each_rule_calls_when_it_should_and_not_when_it_should_not():
    run("promtool", "test", "rules", "dualwrite.rules.test.yaml")


def test_each_rule_has_cases_in_which_it_calls_and_in_which_it_does_not():
    cases = yaml.safe_load((RULES.parent / "dualwrite.rules.test.yaml").read_text(encoding="utf-8"))["tests"]
    asserted = [case for test in cases for case in test["alert_rule_test"]]
    silent = {case["alertname"] for case in asserted if not case.get("exp_alerts")}
    calling = {
        (case["alertname"], alert["exp_labels"]["seen_by"]) for case in asserted for alert in case.get("exp_alerts", ())
    }
    assert {(rule["alert"], rule["labels"]["seen_by"]) for rule in rules()} == calling
    assert {rule["alert"] for rule in rules()} == silent


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['seen_by']}")
def test_an_alert_has_a_severity_and_a_runbook_that_is_about_it(rule):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    page = (
        RUNBOOKS
        / re.fullmatch(
            r"https://docs\.example\.com/dualwrite/runbooks/([a-z-]+)\.html", rule["annotations"]["runbook_url"]
        )[1]
    )
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    assert text.startswith(f"# {rule['alert']}\n")
    assert re.findall("^## (.*)$", text, re.MULTILINE) == SECTIONS


def test_every_runbook_belongs_to_an_alert_and_every_alert_is_on_the_page():
    linked = {rule["annotations"]["runbook_url"].rpartition("/")[2].removesuffix(".html") for rule in rules()}
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == linked
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\| \[(\w+)]\(runbooks/([a-z-]+)\.md\) \| (\w+) \|", page, re.MULTILINE))
    assert shown == {
        (
            rule["alert"],
            rule["annotations"]["runbook_url"].rpartition("/")[2].removesuffix(".html"),
            rule["labels"]["severity"],
        )
        for rule in rules()
    }


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: f"{rule['alert']}-{rule['labels']['seen_by']}")
def test_an_alert_asks_only_for_metrics_that_are_exported(rule):
    exported = exported_by_the_service() if rule["labels"]["seen_by"] == "service" else exported_by_writers()
    asked = metrics_in(rule["expr"])
    assert asked
    assert asked - exported == set()


def panels():
    board = json.loads((OPERATIONS / "grafana" / "dualwrite.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_asks_only_for_metrics_that_are_exported_through_the_chosen_data_source(panel):
    assert {target["datasource"]["uid"] for target in (panel, *panel["targets"]) if "datasource" in target} == {
        "${datasource}"
    }
    for target in panel["targets"]:
        asked = metrics_in(target["expr"])
        assert asked
        assert asked - exported_by_the_service() - exported_by_writers() == set()


def test_no_two_panels_of_the_dashboard_have_one_place():
    taken = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_metric_of_the_service_and_of_writers_is_on_the_dashboard_or_left_out_for_a_reason():
    shown = set().union(*(metrics_in(target["expr"]) for panel in panels() for target in panel["targets"]))
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in exported_by_the_service() | exported_by_writers()}
    exported -= {"target_info"}
    left_out = {
        "dualwrite_build_info": "says the version, which does not change",
        "dualwrite_serve_rounds_total": "the rounds that fail, and how long ago one succeeded, say more",
        "dualwrite_outbox_bytes": "the number of the messages and their age say more; the service shows the bytes",
    }
    assert exported - shown == left_out.keys()


def documents(name):
    return [one for one in yaml.safe_load_all((OPERATIONS / name).read_text(encoding="utf-8")) if one]


KUBERNETES = [f"kubernetes/{name}.yaml" for name in ("serve", "statefulset", "deployment")]


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_file_for_kubernetes_keeps_to_its_schemas(name):
    for document in documents(name):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_the_operators_rules_are_the_rules():
    [found] = documents("kubernetes/prometheusrule.yaml")
    assert (found["apiVersion"], found["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert found["spec"] == yaml.safe_load(RULES.read_text(encoding="utf-8"))


def test_prometheus_is_led_to_every_service_by_a_port_that_it_has():
    services = [one for name in KUBERNETES for one in documents(name) if one["kind"] == "Service"]
    [monitor] = documents("kubernetes/servicemonitor.yaml")
    [wanted] = monitor["spec"]["selector"]["matchExpressions"]
    assert {one["metadata"]["labels"][wanted["key"]] for one in services} == set(wanted["values"])
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    assert [one for one in services if ports - {port["name"] for port in one["spec"]["ports"]}] == []


def test_the_service_takes_the_settings_that_are_shown(tmp_path):
    [shown] = [one for one in documents(KUBERNETES[0]) if one["kind"] == "ConfigMap"]
    for text in (shown["data"]["serve.toml"], (OPERATIONS / "serve.toml").read_text(encoding="utf-8")):
        found = parse_settings(text, "serve.toml", directory=tmp_path, environment={"DATABASE_URL": "sqlite://"})
        assert (found.host, found.port) == ("0.0.0.0", 8470)


def test_the_image_installs_extras_that_there_are():
    text = (OPERATIONS / "Containerfile").read_text(encoding="utf-8")
    extras = re.search(r"DUALWRITE}\[([a-z,]+)]", text)[1].split(",")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras) <= declared.keys()
    copied = re.search(r"^COPY (\S+) ", text, re.MULTILINE)[1]
    assert (OPERATIONS / copied).is_file()


def test_what_compose_mounts_is_there():
    [found] = documents("compose.yaml")
    mounted = [one.split(":")[0] for service in found["services"].values() for one in service.get("volumes", ())]
    assert mounted
    assert [one for one in mounted if not (OPERATIONS / one).exists()] == []


@NEEDS_PROMTOOL
def test_the_configuration_of_prometheus_is_well_formed():
    run("promtool", "check", "config", "prometheus.yaml")


def test_the_documented_command_moves_every_address_of_a_runbook(tmp_path):
    shutil.copytree(OPERATIONS, tmp_path / "operations")
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    command = re.search(r"^\$ (sed -i .*\\\n.*?)  +#", page, re.MULTILINE)[1]
    folder = tmp_path / "operations" / "prometheus"
    subprocess.run(["bash", "-euc", command], check=True, cwd=folder)
    for file in ("dualwrite.rules.yaml", "dualwrite.rules.test.yaml", "../kubernetes/prometheusrule.yaml"):
        moved = re.findall(r"runbook_url: (.*)", (folder / file).read_text(encoding="utf-8"))
        assert {address.rpartition("/runbooks/")[0] for address in moved} == {"https://where.you.serve.them"}


COMPOSE = {"compose.yaml": ROOT, "examples/operations/compose.yaml": OPERATIONS}
DURATION = {"type": "string", "pattern": r"^(\d+(ms|s|m|h))+$"}
TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
# What the Compose Specification says of the keys that these files use; no other key may stand there.
COMPOSE_FORM = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": "^[a-zA-Z0-9._-]+$"},
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "oneOf": [{"required": ["image"]}, {"required": ["build"]}],
                "properties": {
                    "image": {"type": "string", "pattern": "^[a-z0-9./-]+:[A-Za-z0-9._-]+$"},
                    "build": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["context", "dockerfile"],
                        "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}},
                    },
                    "command": TEXTS,
                    "entrypoint": TEXTS,
                    "environment": {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
                    "ports": {**TEXTS, "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
                    "volumes": {**TEXTS, "items": {"type": "string", "pattern": r"^\./[^:]+:/[^:]+:ro$"}},
                    "healthcheck": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["test"],
                        "properties": {
                            "test": {**TEXTS, "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}]},
                            "interval": DURATION,
                            "timeout": DURATION,
                            "retries": {"type": "integer", "minimum": 1},
                        },
                    },
                    "depends_on": {
                        "oneOf": [
                            TEXTS,
                            {
                                "type": "object",
                                "additionalProperties": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "required": ["condition"],
                                    "properties": {
                                        "condition": {
                                            "enum": [
                                                "service_started",
                                                "service_healthy",
                                                "service_completed_successfully",
                                            ]
                                        }
                                    },
                                },
                            },
                        ]
                    },
                },
            },
        },
    },
}


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_is_well_formed_and_waits_only_for_what_can_come(name):
    found = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(COMPOSE_FORM).validate(found)
    services = found["services"]
    for service in services.values():
        if "build" in service:
            assert (COMPOSE[name] / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        awaited = service.get("depends_on", {})
        assert set(awaited) <= services.keys()
        for other in awaited if isinstance(awaited, dict) else ():
            if awaited[other]["condition"] == "service_healthy":
                assert "healthcheck" in services[other]
