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
from sqlalchemy import create_engine

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

    def begin(self, failpoint=""):
        """Start a member. The event of its process, and the file that lets it go."""
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
            "lease_timeout_s": LEASE_S,
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
