"""The page, the probes, the metrics and the status as JSON: what each says of the same snapshots."""

import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from dualwrite.clock import now_s
from dualwrite.protocol.blocking import ActionRecord, Blocker, Deed, Ended, HeldPartition, Intent, StandingGroup
from dualwrite.protocol.findings import CheckResult, Status
from dualwrite.protocol.members import Lease, LeaseState
from dualwrite.protocol.supervision import UNTRIED, Action, Planned, Reason, Seen
from dualwrite.protocol.values import Incident, Outcome, TransactionStatus
from dualwrite.serving.app import make_app
from dualwrite.serving.page import duration, render, view
from dualwrite.serving.supervisor import Round, Snapshot
from dualwrite.stores.sql.ledger import Batch, UnfinishedBatch

from .test_rounds import item, waits

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)
LEASE = Lease("dualwrite-serve-shop-0", "dualwrite-serve-shop", 0, "dualwrite-serve app@host:7 5a33 on boot/1/7", 12.0)
SMALL = item("bills", 500.0, decided=False, partitions=(("bills", 0),))
LARGE = item("orders", 95.0, decided=True, left_s=805.0, partitions=(("orders", 0), ("orders", 1), ("orders", 5)))
LOSS = Incident("old", "7:0;n;i=1;orders@c2FtcGxl:0=3", Outcome.LOST, "aborted by <b>somebody</b>", AT, None)
PLANS = (
    Planned("bills", Action.LEAVE, Reason.LEASED, "its owner is alive"),
    Planned("orders", Action.SETTLE, Reason.DECIDED, "the database has decided", 60.0),
)
DONE = ActionRecord(
    Intent(
        "a" * 32, "orders", Deed.SETTLE, "what it left", "<i>its host</i> is gone", "anna", "dualwrite-serve app@host:7"
    ),
    AT,
    AT,
    Ended.DONE,
    "3 ids settled",
)
CALM = Snapshot(
    "shop",
    leads=True,
    round=Round(
        AT,
        0.2,
        [SMALL, LARGE],
        500.0,
        leader=LEASE,
        seen=[Seen("orders", needs_recovery=True, time_left_s=805.0)],
        history=[DONE],
    ),
    round_s=100.0,
    plans=PLANS,
    now_s=100.0,
    counts={"rounds": 3, "settled": 2},
)


def with_round(**changed):
    return replace(CALM, round=replace(CALM.round, **changed))


def test_what_blocks_most_comes_first_with_its_plan_and_the_reason():
    first, second = view(CALM, 104.0).open
    assert (first.name, first.blocks, first.age, first.time_left) == (
        "orders",
        "orders 0-1, 5",
        "1 min 35 s",
        "13 min 25 s",
    )
    named = "its row names producer 7, epoch 0"
    assert first.decision == f"decided: will be committed; {named}, which is what Kafka shows as open"
    assert first.action == "settle: commit: the database has decided"
    undecided = "undecided: would be aborted; its row does not name it"
    assert (second.name, second.decision, second.action) == ("bills", undecided, "leave")
    ended = replace(LARGE, decided_is_open=False, open_for_s=None)
    shown = [ended, replace(ended, row=replace(ended.row, completed=Outcome.LOST))]
    decisions = [one.decision for one in view(with_round(items=shown), 104.0).open]
    assert decisions == [f"decided: will be committed; {named}", f"lost; {named}"]
    assert (second.time_left, second.because) == ("no limit", "its owner is alive")
    assert view(CALM, 104.0).age == "4 s"
    assert view(CALM, 104.0).role == "this replica settles"
    assert (
        view(replace(CALM, leads=False), 104.0).role
        == "this replica stands by; dualwrite-serve app@host:7 5a33 settles"
    )


def test_the_page_says_when_a_silent_owner_is_taken_for_dead():
    young = Planned("bills", Action.LEAVE, Reason.YOUNG, "young: it began 12 s ago", due_in_s=48.2)
    held = with_round(waiting=[waits("bills", 3)])
    shown = view(replace(held, plans=(young, PLANS[1])), 104.0)
    expected = "leave; settle in 48 s if its owner stays silent"
    assert [row.action for row in (*shown.open, *shown.waiting) if row.name == "bills"] == [expected] * 2
    leased = replace(PLANS[0], due_in_s=20.0)
    assert view(replace(held, plans=(leased,)), 104.0).waiting[0].action == "leave", "a lease is renewed"
    with client(replace(held, plans=(young,))) as asked:
        assert asked.get("/api/status").json()["targets"]["shop"]["plan"][0]["due_in_s"] == 48.2


OTHER = Blocker(
    "job-0-17",
    TransactionStatus.ONGOING,
    7,
    4,
    700.0,
    200.0,
    (HeldPartition("bills", 0, 5, 1_200), HeldPartition("bills", 1, 9, 300)),
    (StandingGroup("ledger", "bills", 0, 5, 1_250),),
)


def test_transactions_of_other_programs_stand_among_ours_by_what_they_block():
    own = replace(OTHER, kafka_id="orders.n.1", groups=(), partitions=(HeldPartition("orders", 0, 3, 40),))
    young = replace(OTHER, kafka_id="job-0-18", open_for_s=0.2)
    held = with_round(blockers=[OTHER, own, young])
    first, second, third = view(held, 104.0).open
    assert (first.name, first.is_ours, first.owner) == ("job-0-17", False, "Flink, by its id")
    assert first.blocks == "bills 0-1: 1,500 records; groups that stand still: ledger (1,250 records)"
    assert (first.age, first.time_left) == ("11 min 40 s", "3 min 20 s")
    assert (first.decision, first.action) == ("not ours: not known here", "none: not ours")
    assert "`dualwrite recover job-0-17 --state 7:4` commits it" in first.because
    assert (second.name, second.is_ours, second.blocks) == ("orders", True, "orders 0: 40 records")
    assert (third.name, third.blocks) == ("bills", "bills 0")
    assert (view(held, 104.0).alarming, view(held, 104.0).summary) == (
        True,
        "2 transactions holding back readers for minutes",
    )
    assert [row.alarming for row in view(held, 104.0).open] == [True, True, False]
    found, _ = scraped(held)
    assert found["dualwrite_other_open_transactions",] == 2.0
    assert found["dualwrite_blocked_records", "false"] == 1500.0
    assert found["dualwrite_blocked_records", "true"] == 40.0
    assert found["dualwrite_blocked_consumer_groups", "false"] == 1.0
    with client(held) as asked:
        shown = asked.get("/api/status").json()["targets"]["shop"]["open_transactions"]
    assert [(one["kafka_id"], one["ours"], one["records"]) for one in shown[:2]] == [
        ("job-0-17", False, 1500),
        ("orders.n.1", True, 40),
    ]
    assert shown[0]["groups"] == [{"group": "ledger", "topic": "bills", "partition": 0, "offset": 5, "records": 1250}]


@pytest.mark.parametrize(
    ("snapshot", "summary"),
    [
        (with_round(incidents=[LOSS]), "1 loss to acknowledge"),
        (replace(CALM, plans=[replace(PLANS[0], reason=Reason.FAILED)]), "1 writer that cannot be settled"),
        (replace(CALM, plans=[replace(PLANS[0], reason=Reason.WENT_BACK)]), "1 writer that cannot be settled"),
        (with_round(waiting=[waits("orders", 3)._replace(aside=4)]), "4 messages refused by Kafka"),
        (replace(CALM, error="Kafka is away"), "a server does not answer: this is what was seen last"),
        (Snapshot("shop", error="Kafka is away"), "no answer yet"),
    ],
)
def test_the_page_says_at_once_that_a_person_is_needed(snapshot, summary):
    shown = view(snapshot, 104.0)
    assert (shown.alarming, shown.summary) == (True, summary)
    assert "<title>⚠ dualwrite" in render([CALM, snapshot], 104.0, refresh_s=10)


@pytest.mark.parametrize(
    "snapshot",
    [
        CALM,
        replace(CALM, plans=PLANS[:1]),
        with_round(waiting=[waits("orders", 3)]),
        with_round(blockers=[replace(OTHER, open_for_s=119.0)]),
        with_round(blockers=[replace(OTHER, open_for_s=299.0, groups=())]),
        with_round(blockers=[replace(OTHER, partitions=(HeldPartition("bills", 0, None, 0),), groups=())]),
    ],
)
def test_nobody_is_called_for_what_the_service_does_itself(snapshot):
    assert not view(snapshot, 104.0).alarming
    assert "<title>dualwrite" in render([snapshot], 104.0, refresh_s=10)


def test_attempts_are_shown_with_the_last_and_the_next_one():
    failed = UNTRIED.failed(90.0, "Kafka is away").failed(95.0, "Kafka is away")
    first, second = view(replace(CALM, tries={"orders": failed}), 104.0).open
    assert (first.tries, second.tries) == ("last 5 s ago, next in 5 s", "none")


def test_the_page_needs_no_script_escapes_what_it_shows_and_loads_itself_again():
    finding = CheckResult("Kafka", "timeout", Status.WARNING, "15 minutes", "what is decided may be lost", "raise it")
    held = replace(with_round(incidents=[LOSS], warnings=["old versions of rows"]), findings=(finding,))
    page = render([held], 104.0, refresh_s=10)
    assert "<li>warning: timeout: 15 minutes: what is decided may be lost. To fix it: raise it</li>" in page
    with client(held) as asked:
        assert asked.get("/api/status").json()["targets"]["shop"]["findings"][0]["remedy"] == "raise it"
    assert scraped(held)[0]["dualwrite_findings", "warning"] == 1.0
    assert '<meta http-equiv="refresh" content="10">' in page
    assert "prefers-color-scheme: dark" in page
    assert "<script" not in page
    assert "aborted by &lt;b&gt;somebody&lt;/b&gt;" in page
    assert "<li>old versions of rows</li>" in page
    assert 'data-label="begun">2026-01-01 00:00:00<' in page
    assert 'data-label="who">anna (dualwrite-serve app@host:7)<' in page
    assert 'data-label="what">settle orders: what it left<' in page
    assert 'data-label="why">&lt;i&gt;its host&lt;/i&gt; is gone<' in page
    assert 'data-label="outcome">done: 3 ids settled<' in page


class Balanced(HTMLParser):
    """Holds that every element is closed by its own end tag."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, _attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


def batch(phase, nobody_since=None, sink="flights"):
    made = Batch(sink, "7", phase, 8, 3, 900, 900, AT, None, None, None, None, None)
    return UnfinishedBatch(made, nobody_since)


def test_batches_whose_driver_is_gone_are_shown_with_what_becomes_of_them():
    slot = item("flights.spark#3", 500.0, decided=True)
    shown = with_round(
        items=[slot], batches=[batch("writing"), batch("writing", AT), batch("failed"), batch("decided")]
    )
    running, deserted, failed, decided = view(shown, 104.0).batches
    assert (running.sink, running.name, running.partitions, running.nobody_since) == ("flights", "7", "3 of 8", "-")
    assert running.because == "its job may be at work; 1 transactions of its tasks are unsettled"
    assert deserted.because.startswith("its driver is gone, or computes for long before it writes: run the job again")
    assert deserted.nobody_since == "2026-01-01 00:00:00"
    assert failed.because.startswith("its last run failed: run the job again")
    assert decided.because == "all of it is written; 1 transactions of its tasks are being completed"
    assert [row.alarming for row in view(shown, 104.0).batches] == [False, True, True, False]
    assert view(with_round(batches=[batch("decided")]), 104.0).batches == [], "nothing is left of it"
    assert "<h3>Spark batches</h3>" in render([shown], 104.0, refresh_s=10)
    with client(shown) as asked:
        found = asked.get("/api/status").json()["targets"]["shop"]["batches"]
    assert [(one["batch_id"], one["phase"], one["nobody_at_work_since"]) for one in found[:2]] == [
        ("7", "writing", None),
        ("7", "writing", "2026-01-01T00:00:00+00:00"),
    ]
    assert found[0]["outlook"] == running.because


def test_every_cell_of_the_page_has_its_label_and_its_place():
    held = with_round(
        incidents=[LOSS], waiting=[waits("orders", 3)], batches=[batch("failed")], warnings=["old versions of rows"]
    )
    page = render([held, Snapshot("empty")], 104.0, refresh_s=10)
    checked = Balanced()
    checked.feed(page)
    assert checked.open == []
    for table in page.split("<table>")[1:]:
        heads = re.findall(r"<th>(.*?)</th>", table)
        for row in table.partition("<tbody>")[2].partition("</tbody>")[0].split("</tr>")[:-1]:
            assert re.findall(r'data-label="(.*?)"', row) == heads, "on a telephone the labels stand in for the head"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (95, "1 min 35 s"),
        (3660, "1 h 1 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_times_are_for_people(seconds, words):
    assert duration(seconds) == words


@dataclass
class Target:
    name: str = "shop"
    timeout_s: float = 1.0


class Stub:
    """A supervisor that does nothing, and shows what it is given."""

    target, interval_s, stalled_after_s = Target(), 5.0, 100.0

    def __init__(self, snapshot, *, is_running=True, alive_s=None):
        self.snapshot, self.is_running = snapshot, is_running
        self.alive_s = now_s() if alive_s is None else alive_s
        self.calls = []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def join(self, timeout_s):
        self.calls.append("join")
        return timeout_s > self.target.timeout_s


@contextmanager
def client(*snapshots, **stub):
    with TestClient(make_app([Stub(snapshot, **stub) for snapshot in snapshots])) as made:
        yield made


def test_the_application_starts_its_supervisors_and_waits_for_them():
    stub = Stub(CALM)
    with TestClient(make_app([stub])):
        assert stub.calls == ["start"]
    assert stub.calls == ["start", "stop", "join"]


@pytest.mark.parametrize(
    ("snapshot", "stub", "health", "readiness"),
    [
        (CALM, {}, (200, "ok"), (200, "ok")),
        (replace(CALM, error="Kafka is away"), {}, (200, "ok"), (503, "shop: Kafka is away")),
        (Snapshot("shop"), {}, (200, "ok"), (503, "shop: no round has ended yet")),
        (CALM, {"is_running": False}, (503, "shop: its thread has ended"), (200, "ok")),
        (CALM, {"alive_s": now_s() - 200.0}, (503, "shop: a round has stalled"), (200, "ok")),
    ],
)
def test_probes_ask_for_a_restart_only_if_that_helps(snapshot, stub, health, readiness):
    with client(snapshot, **stub) as asked:
        assert [(one.status_code, one.text) for one in (asked.get("/healthz"), asked.get("/readyz"))] == [
            health,
            readiness,
        ]


def test_the_page_may_load_nothing_and_stands_in_no_frame():
    with client(CALM) as asked:
        answer = asked.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert 'content="5"' in answer.text


def test_the_status_is_that_of_the_command_with_the_plan():
    failed = UNTRIED.failed(90.0, "Kafka is away").failed(95.0, "Kafka is away")
    with client(replace(CALM, tries={"orders": failed}), replace(CALM, target="empty", round=None)) as asked:
        shown = asked.get("/api/status").json()["targets"]
    assert [one["transactional_id"] for one in shown["shop"]["ids"]] == ["bills", "orders"]
    assert shown["shop"]["ids"][0]["partitions"] == [{"topic": "bills", "partition": 0}]
    assert {"longest_open_s", "incidents", "leases", "outbox", "warnings", "leads", "at", "error", "plan"} < shown[
        "shop"
    ].keys()
    assert shown["shop"]["plan"][1] == {
        "writer": "orders",
        "action": "settle",
        "reason": "decided",
        "because": "the database has decided",
        "due_in_s": None,
        "attempts_failed": 2,
        "last_error": "Kafka is away",
        "next_try_in_s": 5.0,
    }
    assert shown["empty"] == {"leads": True, "error": None, "at": None, "plan": []}


def scraped(*snapshots):
    with client(*snapshots) as asked:
        answer = asked.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for key, value in sample.labels.items() if key != "target")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }, answer.text


def test_the_metrics_say_what_the_page_says():
    held = with_round(incidents=[LOSS], waiting=[waits("orders", 3)._replace(aside=4)], leases=[LEASE], skew_s=-0.5)
    found, text = scraped(held)
    assert LEASE.state is LeaseState.HELD
    expected = {
        ("dualwrite_up",): 1.0,
        ("dualwrite_serve_leader",): 1.0,
        ("dualwrite_clock_skew_seconds",): -0.5,
        ("dualwrite_unsettled_writers", "settle", "decided"): 1.0,
        ("dualwrite_unsettled_writers", "leave", "leased"): 1.0,
        ("dualwrite_open_transactions", "true"): 1.0,
        ("dualwrite_open_transactions", "false"): 1.0,
        ("dualwrite_oldest_open_transaction_seconds",): 500.0,
        ("dualwrite_oldest_decided_transaction_seconds",): 95.0,
        ("dualwrite_partitions_with_late_transactions", "true"): 0.0,
        ("dualwrite_partitions_with_late_transactions", "false"): 0.0,
        ("dualwrite_went_back_ids",): 0.0,
        ("dualwrite_decided_transaction_time_left_seconds",): 805.0,
        ("dualwrite_unacknowledged_incidents", "lost"): 1.0,
        ("dualwrite_unacknowledged_incidents", "unverifiable"): 0.0,
        ("dualwrite_waiting_messages", "orders"): 3.0,
        ("dualwrite_waiting_bytes", "orders"): 10.0,
        ("dualwrite_waiting_oldest_seconds", "orders"): 70.0,
        ("dualwrite_aside_messages", "orders"): 4.0,
        ("dualwrite_serve_rounds_total",): 3.0,
        ("dualwrite_serve_settled_ids_total",): 2.0,
        ("dualwrite_serve_failed_attempts_total",): 0.0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert '{target="shop"}' in text


def test_partitions_are_counted_that_old_transactions_of_writers_and_of_others_hold_back():
    shared, empty, unknown = (
        HeldPartition("bills", 0, 5, 9),
        HeldPartition("bills", 1, None, 0),
        HeldPartition("bills", 2),
    )
    own = replace(OTHER, kafka_id="bills.n.1", open_for_s=301.0, partitions=(shared, HeldPartition("orders", 0, 1, 1)))
    young = replace(OTHER, kafka_id="job-0-18", open_for_s=299.0, partitions=(HeldPartition("bills", 3, 1, 1),))
    old = [replace(OTHER, kafka_id=f"job-1-{number}", partitions=(shared, empty, unknown)) for number in range(2)]
    found, _ = scraped(with_round(blockers=[own, young, *old]))
    late = "dualwrite_partitions_with_late_transactions"
    assert found[late, "true"] == 2.0
    assert found[late, "false"] == 2.0, "each once; and not the one in which nothing is written"


def test_a_decision_that_kafka_does_not_show_as_open_is_as_old_as_its_row():
    following = replace(
        LARGE, open_for_s=None, decided_is_open=False, kafka_status=TransactionStatus.PREPARE_COMMIT, partitions=()
    )
    idle = replace(following, needs_recovery=False)
    back = replace(SMALL, went_back="its row lost a claim")
    found, _ = scraped(with_round(items=[following, back], skew_s=2.0))
    assert found["dualwrite_oldest_decided_transaction_seconds",] == 98.0
    assert found["dualwrite_went_back_ids",] == 1.0
    assert scraped(with_round(items=[idle]))[0]["dualwrite_oldest_decided_transaction_seconds",] == 0.0


def test_a_target_that_has_not_answered_is_down_and_shows_nothing_else():
    found, _ = scraped(Snapshot("shop", error="Kafka is away", counts={"failed rounds": 1}))
    assert found["dualwrite_up",] == 0.0
    assert found["dualwrite_serve_failed_rounds_total",] == 1.0
    assert ("dualwrite_oldest_open_transaction_seconds",) not in found


def test_every_metric_is_on_the_page_about_the_service():
    from harness.places import ROOT

    words = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    _, text = scraped(with_round(incidents=[LOSS], waiting=[waits("orders", 3)]))
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert len(names) > 15
    assert {name for name in names if name not in words} == set()
