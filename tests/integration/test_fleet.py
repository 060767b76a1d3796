"""Members of a fleet as real processes on real servers: killed, paused, replaced; then both sides agree, and no id is left."""

import json
import os
import signal

import psutil
import pytest
from harness.checker import Case
from harness.fleet_member import member
from harness.forking import processes
from harness.orders import on_postgresql
from harness.patience import wait_until
from harness.planting import ENVIRONMENT as MISTAKE
from harness.worker import METADATA
from sqlalchemy import create_engine, text

from dualwrite.recovery.recover import status
from dualwrite.stores.sql.leases import read_leases

pytestmark = [on_postgresql, pytest.mark.slow]

LEASE_S = 5.0
"""Many heartbeats long: a busy machine must not let a live member seem dead."""
POINTS = [
    "lease.taken",
    "lease.heartbeat:2",
    "lease.settled",
    "lease.given_back",
    "write.produced:9",
    "write.decided:4",
]


class Fleet(Case):
    """A fleet named ``case``; its members write until they may go."""

    def __init__(self, *args):
        super().__init__(*args)
        self.engine = create_engine(self.url)
        METADATA.create_all(self.engine)
        self.members = []

    def begin(self, failpoint="", lease_s=LEASE_S, heartbeat_s=None, outbox="never"):
        """Start a member. Its process, and the file that lets it go."""
        self.workers += 1
        name = f"w{self.workers}"
        until, path = self.directory / f"{name}.until", self.directory / f"{name}.json"
        job = {
            "name": name,
            "kafka": self.kafka,
            "url": self.url,
            "topic": self.topic,
            "transactional_id": self.transactional_id,
            "journal": str(self.journal),
            "until": str(until),
            "lease_timeout_s": lease_s,
            "heartbeat_s": heartbeat_s,
            "outbox": outbox,
        }
        path.write_text(json.dumps(job))
        process = processes().Process(
            target=member, args=(path, failpoint, os.environ.get(MISTAKE), self.directory / f"{name}.log")
        )
        process.start()
        self.members.append((process, until))
        return process, until

    def leases(self):
        return {lease.transactional_id: lease.state.value for lease in read_leases(self.engine)}

    def owner(self, name):
        [found] = read_leases(self.engine, name)
        return found.owner

    def end(self):
        for _, until in self.members:
            until.touch()
        for process, _ in self.members:
            process.join(60)
            process.kill()
            process.join()
        self.engine.dispose()


@pytest.fixture
def fleet(tmp_path, kafka, url, dualwrite_topic):
    made = Fleet(tmp_path, kafka, url, dualwrite_topic)
    yield made
    made.end()


def held(fleet):
    return [name for name, state in fleet.leases().items() if state == "held"]


def test_members_killed_at_every_point_leave_no_id_behind_and_both_sides_agree(fleet):
    living, go = fleet.begin()
    wait_until(lambda: held(fleet))
    dying = [fleet.begin(point) for point in POINTS]
    for _, until in dying[2:4]:  # these die while they close
        until.touch()
    for process, _ in dying:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    wait_until(lambda: sorted(fleet.leases().values()) == ["free"] * (len(fleet.leases()) - 1) + ["held"])
    assert len(fleet.leases()) <= len(POINTS) + 1
    go.touch()
    living.join(60)
    assert living.exitcode == 0
    assert set(fleet.leases().values()) == {"free"}
    assert fleet.verify()
    assert not [item for item in status(kafka=fleet.kafka, database=fleet.url) if item.needs_recovery]


LIVE_LONG = {"lease_s": 3600.0, "heartbeat_s": 0.2}
"""No lease expires while a test runs."""


@pytest.mark.parametrize("point", ["write.prepared:3:kill", "write.decided:3:kill"])
def test_what_a_killed_member_has_left_is_settled_by_those_beside_it_before_its_lease_expires(fleet, point):
    living, go = fleet.begin(**LIVE_LONG)
    wait_until(lambda: held(fleet) == ["case-0"])
    dying, _ = fleet.begin(point, **LIVE_LONG)
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    wait_until(lambda: fleet.leases() == {"case-0": "held", "case-1": "free"})
    go.touch()
    living.join(60)
    assert living.exitcode == 0
    assert not [item for item in status(kafka=fleet.kafka, database=fleet.url) if item.needs_recovery]
    assert fleet.verify()


@pytest.mark.parametrize(
    "point", ["write.waits:5", pytest.param("outbox.deleted:2", marks=pytest.mark.thorough), "outbox.read:3"]
)
def test_what_a_killed_member_has_left_waiting_is_sent_by_those_beside_it(fleet, point):
    """At once, and while they go on with messages of their own, which go directly."""
    living, go = fleet.begin(**LIVE_LONG)
    wait_until(lambda: held(fleet) == ["case-0"])
    dying, _ = fleet.begin(point, outbox="always", **LIVE_LONG)
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    wait_until(lambda: fleet.leases() == {"case-0": "held", "case-1": "free"})
    with fleet.engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM dualwrite_outbox")) == 0
    go.touch()
    living.join(60)
    assert living.exitcode == 0
    assert not [item for item in status(kafka=fleet.kafka, database=fleet.url) if item.needs_recovery]
    assert any(name.startswith("w2") for name in fleet.verify())


def test_a_suspended_member_keeps_its_id_and_goes_on_under_it(fleet):
    suspended, _ = fleet.begin("write.body_done:3:stop", **LIVE_LONG)
    wait_until(lambda: psutil.Process(suspended.pid).status() == psutil.STATUS_STOPPED)
    owner = fleet.owner("case-0")
    fleet.begin(**LIVE_LONG)
    # Many heartbeats later, in which the other one has looked at it.
    wait_until(lambda: sum(name.startswith("w2-") for name in fleet.in_database()) > 100)
    assert fleet.owner("case-0") == owner
    os.kill(suspended.pid, signal.SIGCONT)
    wait_until(lambda: sum(name.startswith("w1-") for name in fleet.in_database()) > 5)
    assert fleet.owner("case-0") == owner
    assert "Aborted" not in (fleet.directory / "w1.log").read_text()
    for process, until in fleet.members:
        until.touch()
        process.join(60)
    assert fleet.verify()


def test_a_paused_member_that_was_taken_for_dead_aborts_and_goes_on_under_a_new_lease(fleet):
    paused, _ = fleet.begin("write.body_done:3:stop")
    wait_until(lambda: psutil.Process(paused.pid).status() == psutil.STATUS_STOPPED)
    former = fleet.owner("case-0")
    fleet.begin()  # takes its id if that has expired by now, and settles it in time otherwise
    wait_until(lambda: fleet.owner("case-0") != former)
    fleet.begin()
    wait_until(lambda: {"w2-0", "w3-0"} <= set(fleet.in_database()))
    os.kill(paused.pid, signal.SIGCONT)
    wait_until(lambda: sum(name.startswith("w1-") for name in fleet.in_database()) > 5)
    log = (fleet.directory / "w1.log").read_text()
    assert "w1-2: TransactionAborted aborted" in log, log
    for _, until in fleet.members:
        until.touch()
    for process, _ in fleet.members:
        process.join(60)
        assert process.exitcode == 0
    rows = fleet.verify()
    assert {"w1-0", "w1-1"} <= rows
    assert "w1-2" not in rows
    assert "case-0: lost its id; this member continues as" in (fleet.directory / "w1.log").read_text()
    assert set(fleet.leases().values()) == {"free"}
