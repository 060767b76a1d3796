"""OpenLineage's events of a writer: its topics and its tables under one run, whatever the transport does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from harness.page_examples import example, run_example
from sqlalchemy import create_engine, text

from dualwrite import ConfigurationError, DualWriter, TransactionAborted
from dualwrite.errors import CompletionPending, DecidedTransactionLost
from dualwrite.interfaces import Observer, WriteObserver
from dualwrite.testing import InMemoryWriter

pytest.importorskip("openlineage", reason="the extra 'openlineage' is not installed")

from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import RunState
from openlineage.client.serde import Serde
from openlineage.client.transport import Transport
from openlineage.client.transport.http import HttpConfig, HttpTransport

from dualwrite.telemetry import lineage as module
from dualwrite.telemetry.lineage import Lineage, LineageRun, emit_alone, table_dataset, topic_dataset

KAFKA = {"bootstrap.servers": "kafka-1:9092,kafka-2:9092"}
URL = "postgresql+psycopg://app:secret@db/shop"


class Recorded(Transport):
    kind = "recorded"

    def __init__(self):
        self.events = []
        self.arrived = threading.Condition()
        self.is_closed = False

    def emit(self, event):
        with self.arrived:
            self.events.append(json.loads(Serde.to_json(event)))
            self.arrived.notify_all()

    def close(self, timeout=-1):
        self.is_closed = timeout > 0
        return True

    def wait(self, count):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.events) >= count, 30)
            return self.events


@pytest.fixture
def sent():
    return Recorded()


@pytest.fixture
def lineage(sent):
    def lineage(**given):
        return Lineage(
            kafka=KAFKA, database=URL, tables=["orders", "audit.log"], client=OpenLineageClient(transport=sent), **given
        )

    return lineage


def produce(writer, *topics):
    with writer.transaction() as tx:
        for topic in topics:
            tx.produce(topic, "1")


def outputs(event):
    return {
        (one["namespace"], one["name"]): one.get("outputFacets", {}).get("outputStatistics", {}).get("rowCount")
        for one in event["outputs"]
    }


TABLES = {("postgres://db:5432", "shop.public.orders"): None, ("postgres://db:5432", "shop.audit.log"): None}


def test_topics_and_tables_of_a_writer_are_under_one_run_from_its_opening_to_its_closing(lineage, sent):
    with InMemoryWriter("shop", telemetry=lineage(namespace="prod", every_s=0.05)) as writer:
        sent.wait(1)
        produce(writer, "orders", "orders", "bills")
        with pytest.raises(ZeroDivisionError), writer.transaction() as tx:
            tx.produce("orders", "aborted")
            raise ZeroDivisionError
        sent.wait(2)
        produce(writer, "orders")
    events = sent.events
    assert {event["run"]["runId"] for event in events} == {events[0]["run"]["runId"]}
    assert {(event["job"]["namespace"], event["job"]["name"]) for event in events} == {("prod", "shop")}
    kinds = [event["eventType"] for event in events]
    assert (kinds[0], set(kinds[1:-1]), kinds[-1]) == ("START", {"RUNNING"}, "COMPLETE")
    assert outputs(events[0]) == TABLES
    assert outputs(events[-1]) == {
        ("kafka://kafka-1:9092", "orders"): 3, ("kafka://kafka-1:9092", "bills"): 1, **TABLES
    }  # fmt: skip
    assert events[0]["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    assert events[0]["run"]["facets"]["processing_engine"]["name"] == "dualwrite"
    assert "secret" not in json.dumps(events)


def test_the_code_of_the_page_makes_a_writer():
    (code,) = example("telemetry.md", "OpenLineage")
    names = run_example(code, "orders", kafka=KAFKA, engine=create_engine(URL), DualWriter=DualWriter)
    assert isinstance(names["writer"], DualWriter)


def test_each_opening_is_another_run_and_a_fleet_may_share_a_job(lineage, sent):
    shared = lineage(job="shop")
    for name in ("shop-0", "shop-1"):
        with InMemoryWriter(name, telemetry=shared):
            pass
    assert {event["job"]["name"] for event in sent.events} == {"shop"}
    assert len({event["run"]["runId"] for event in sent.events}) == 2


def test_what_waits_or_is_pending_is_counted_and_a_loss_fails_the_run(lineage, sent):
    with InMemoryWriter("shop", outbox="fallback", telemetry=lineage()) as writer, writer.outage():
        produce(writer, "orders")
    assert outputs(sent.events[-1]) == {("kafka://kafka-1:9092", "orders"): None, **TABLES}
    with InMemoryWriter("shop", telemetry=lineage()) as writer:
        writer.fail_next("complete", CompletionPending)
        with pytest.raises(CompletionPending):
            produce(writer, "orders")
        writer.fail_next("commit", TransactionAborted)
        with pytest.raises(TransactionAborted):
            produce(writer, "orders")
        writer.fail_next("complete", DecidedTransactionLost)
        with pytest.raises(DecidedTransactionLost):
            produce(writer, "orders")
    last = sent.events[-1]
    assert (last["eventType"], last["run"]["facets"]["errorMessage"]["message"]) == ("FAIL", "DecidedTransactionLost")
    assert outputs(last)["kafka://kafka-1:9092", "orders"] == 2


def test_another_observer_hears_everything(lineage):
    heard = []

    class Write(WriteObserver):
        def sent(self, topic, count):
            heard.append((topic, count))

        def __exit__(self, *_):
            heard.append("end")

    class Also(Observer):
        def writing(self, writer, database):
            heard.append((writer, database))
            return Write()

        def opened(self, *_):
            heard.append("open")
            return lambda: heard.append("closed")

    with InMemoryWriter("shop", telemetry=lineage(also=Also())) as writer:
        produce(writer, "orders")
    assert heard == ["open", ("shop", "sqlite"), ("orders", 1), "end", "closed"]


def test_a_transport_that_fails_is_logged_and_hurts_no_dual_write(caplog):
    class Failing(Transport):
        kind = "failing"

        def emit(self, _):
            raise OSError("no server")

    given = Lineage(kafka=KAFKA, database=URL, client=OpenLineageClient(transport=Failing()))
    with InMemoryWriter("shop", telemetry=given) as writer:
        produce(writer, "orders")
        assert len(writer.messages) == 1
    assert "shop: the lineage event COMPLETE was not sent: no server" in caplog.text


def test_events_reach_a_server_over_http():
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_):
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        transport = HttpTransport(HttpConfig(url=f"http://127.0.0.1:{server.server_port}"))
        given = Lineage(kafka=KAFKA, database=URL, client=OpenLineageClient(transport=transport))
        with InMemoryWriter("shop", telemetry=given) as writer:
            produce(writer, "orders")
        server.shutdown()
        serving.join()
        transport.close(1)
    assert [(path, body["eventType"]) for path, body in bodies] == [
        ("/api/v1/lineage", "START"),
        ("/api/v1/lineage", "COMPLETE"),
    ]


def test_a_run_of_a_batch_names_its_parent(sent):
    run = LineageRun(
        OpenLineageClient(transport=sent), "spark", "flights", streaming=False, parent=("spark", "app", "0" * 32)
    )
    run.emit(RunState.COMPLETE, [topic_dataset("k:9092", "flights", messages=5), table_dataset(URL, "flights", rows=7)])
    (event,) = sent.events
    assert event["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    assert event["run"]["facets"]["parent"]["job"] == {"namespace": "spark", "name": "app", "facets": {}}
    assert outputs(event) == {("kafka://k:9092", "flights"): 5, ("postgres://db:5432", "shop.public.flights"): 7}


def test_an_event_of_its_own_has_left_when_the_call_returns(sent, monkeypatch):
    """The process may end then, with what a transport that sends later still holds."""
    monkeypatch.setattr(module, "OpenLineageClient", lambda: OpenLineageClient(transport=sent))
    emit_alone("spark", "flights", "START", [topic_dataset("k:9092", "flights")], [], run_id="0" * 32, streaming=True)
    assert sent.is_closed
    (event,) = sent.events
    assert (event["eventType"], event["run"]["runId"]) == ("START", "0" * 32)
    assert event["job"]["facets"]["jobType"]["processingType"] == "STREAMING"


@pytest.mark.parametrize("fails", ["made", "closed"])
def test_an_event_whose_client_cannot_be_made_or_closed_is_logged(sent, monkeypatch, caplog, fails):
    def broken(*_):
        raise ValueError("no such transport")

    monkeypatch.setattr(sent, "close", broken)
    client = broken if fails == "made" else lambda: OpenLineageClient(transport=sent)
    monkeypatch.setattr(module, "OpenLineageClient", client)
    emit_alone("spark", "flights", "START", [], [], run_id="0" * 32, streaming=True)
    assert "flights: the lineage event START was not sent: no such transport" in caplog.text


@pytest.mark.parametrize(
    ("url", "namespace", "name"),
    [
        ("postgresql://db:6432/shop", "postgres://db:6432", "shop.public.orders"),
        ("postgresql+psycopg:///shop?host=/run/pg", "postgres:///run/pg:5432", "shop.public.orders"),
        ("mysql+pymysql://db/shop", "mysql://db:3306", "shop.orders"),
        ("sqlite:////srv/shop.db", "sqlite:///srv/shop.db", "orders"),
    ],
)
def test_names_of_tables(url, namespace, name):
    found = table_dataset(url, "orders")
    assert (found.namespace, found.name) == (namespace, name)
    assert table_dataset(create_engine("sqlite://"), "orders").name == "orders"


@pytest.mark.parametrize("given", [{"kafka": {}}, {"every_s": 0}])
def test_settings_that_cannot_work_are_refused(given):
    with pytest.raises(ConfigurationError):
        Lineage(**{"kafka": KAFKA, "database": URL, **given})


def test_off_it_costs_nothing():
    """Without it no observer is called, and OpenLineage is not loaded: tests/unit/project/test_extras.py."""
    with InMemoryWriter("shop") as writer, writer.transaction() as tx:
        tx.connection.execute(text("SELECT 1"))
        assert writer.health().ready
    assert not [one for one in threading.enumerate() if one.name == "dualwrite lineage"]
