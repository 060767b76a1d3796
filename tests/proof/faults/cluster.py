"""Three brokers: what leads and what coordinates goes away at every stage of a dual write, or comes back with old answers.

In some cases each partition is on one broker alone: while that one is suspended, its markers are skipped (KAFKA-20734).

``python -m faults.cluster --cases 100``: each case kills, suspends or moves one broker's work at one point. The counts go to
the page of the matrix.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import ElectionType, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from harness.hanging import abort_hanging

from dualwrite import DualWriter, WriterLimits, recover
from dualwrite.clock import Deadline
from dualwrite.errors import Unavailable
from dualwrite.kafka.config import EngineName
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.testing import Api, EmbeddedKafka, EmbeddedPostgres, KafkaProxy
from faults.run import keep_line, owners_can_import, show_story
from faults.stage import Owner, OwnerContext, Result, Slot, Stage
from faults.work import BOTH, MESSAGES, Operation

BROKERS = 3
RECOVERS_S = 180.0
WRITING = ("write.begun", "write.produced", "write.prepared", "write.recorded", "write.decided")
SETTLING = ("claim.row_raised", "settle.looked", "settle.before_commit", "settle.committed", "settle.before_retire")
POINTS = (*WRITING, *SETTLING)
ROLES = ("transaction coordinator", "leader of partition 0", "leader of partition 1", "group coordinator")
DEEDS = ("kill", "suspend", "move")
PATIENT: dict[str, object] = {"socket.timeout.ms": 3000}


@contextlib.contextmanager
def three_brokers(producer_engine: EngineName) -> Iterator[OwnerContext]:
    """A cluster, and a database."""
    owners_can_import()
    properties = {"transaction.max.timeout.ms": "2147483647"}
    with EmbeddedKafka(properties, brokers=BROKERS, start_timeout_s=240) as kafka, EmbeddedPostgres() as postgres:
        context = OwnerContext.prepare(kafka, postgres, producer_engine)
        warm = {
            "kafka": kafka.client_config(),
            "database": context.engine,
            "limits": WriterLimits(timeout_s=RECOVERS_S),
        }
        with DualWriter("warm-up", **warm):
            pass
        try:
            yield context
        finally:
            context.close()


def leader(admin: AdminClient, topic: str, partition: int) -> int:
    """The id of the broker that leads a partition."""
    return admin.list_topics(topic, timeout=120).topics[topic].partitions[partition].leader


def keeper(admin: AdminClient, topic: str, key: str) -> int:
    """The id of the broker that coordinates a transactional id or a group, by the internal topic that keeps it."""
    hashed = 0
    for character in key:
        hashed = (31 * hashed + ord(character)) & 0xFFFFFFFF
    absolute = hashed if hashed < 2**31 else 2**32 - hashed
    return leader(admin, topic, absolute % len(admin.list_topics(topic, timeout=120).topics[topic].partitions))


def wait_until_in_sync(admin: AdminClient) -> None:
    """Wait until every replica of everything is in sync: then any broker may go."""
    deadline = Deadline(RECOVERS_S)
    while not all(
        len(partition.isrs) == len(partition.replicas)
        for topic in admin.list_topics(timeout=120).topics.values()
        for partition in topic.partitions.values()
    ):
        if deadline.expired:
            raise Unavailable(f"not all replicas are in sync after {RECOVERS_S:g} s")
        time.sleep(0.2)


@dataclass(frozen=True)
class Failure:
    """A plan: what happens to which broker, and when.

    Attributes:
        point: The fail point where an owner waits meanwhile.
        role: What the broker does for this dual write.
        deed: What happens to it.
        kill: Whether the owner is killed at the same time.
    """

    point: str
    role: str
    deed: str
    kill: bool = False

    def __str__(self) -> str:
        return f"{self.deed} {self.role} at {self.point}{', and the owner' if self.kill else ''}"

    @classmethod
    def drawn(cls, seed: int) -> Failure:
        rng = random.Random(f"cluster {seed}")
        # A killed broker takes long to come back.
        deed = rng.choices(DEEDS, weights=(1, 2, 1))[0]
        return cls(rng.choice(POINTS), rng.choice(ROLES), deed, rng.random() < 0.25)


class InCluster(Stage):
    """A case on three brokers, without proxies."""

    patience_s = 60.0
    bound_s = 300.0

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot, settings=PATIENT)
        self.gone: int | None = None
        self.suspended = False

    def open(self, closed_later: contextlib.ExitStack) -> None:
        pass

    def ways(self) -> tuple[dict[str, str], str]:
        return self.context.kafka.client_config(), self.context.url

    @property
    def admin(self) -> AdminClient:
        return self.context.admin

    def broker_of(self, role: str) -> int:
        """The broker that has this role for the present transaction."""
        if role == "transaction coordinator":
            (row,) = SqlStateStore(self.context.engine).read([self.transactional_id])
            return keeper(self.admin, "__transaction_state", row.kafka_id(row.incarnation))
        if role == "group coordinator":
            return keeper(self.admin, "__consumer_offsets", self.group)
        return leader(self.admin, self.topic, int(role[-1]))

    def take(self, broker: int, deed: str) -> None:
        """Do the deed to a broker."""
        self.note(f"{deed} broker {broker}")
        if deed == "move":
            # Brokers that come back lead no partition until an election is requested.
            self.admin.elect_leaders(ElectionType.PREFERRED).result(120)
            return
        self.gone = broker
        self.suspended = deed == "suspend"
        if self.suspended:
            self.context.kafka.suspend(broker)
        else:
            self.context.kafka.kill(broker)

    def bring_back(self) -> None:
        """The broker that is gone comes back."""
        if self.gone is None:
            return
        broker, self.gone = self.gone, None
        self.note(f"broker {broker} comes back")
        if self.suspended:
            self.context.kafka.resume(broker)
        else:
            self.context.kafka.start(broker)

    def heal(self) -> None:
        self.act_now()
        self.bring_back()
        for owner in self.owners:
            owner.go()
        wait_until_in_sync(self.admin)

    def until_at(self, owner: Owner, point: str) -> bool:
        self.pump(lambda: owner.ended or owner.at == point)
        return owner.at == point

    def all_ended(self) -> bool:
        return all(owner.ended for owner in self.owners)


class Failover(InCluster):
    """One failure at one point."""

    def __init__(self, slot: Slot, failure: Failure, seed: int = 0) -> None:
        super().__init__(slot)
        self.failure = failure
        rng = random.Random(f"{failure} {seed}")
        kinds = [BOTH] if failure.role == "group coordinator" else [MESSAGES, BOTH]
        self._operations = tuple(Operation(rng.choice(kinds)) for _ in range(3))
        self._back_after_s = rng.choice([1.0, 6.0, 12.0])

    def play(self) -> None:
        failure = self.failure
        if failure.point in SETTLING:
            dead = self.own(self._operations, "1:write.decided")
            if self.until_at(dead, "1:write.decided"):
                dead.kill()
            owner, point = self.own(self._operations, f"-1:{failure.point}"), f"-1:{failure.point}"
        else:
            owner, point = self.own(self._operations, f"1:{failure.point}"), f"1:{failure.point}"
        if self.until_at(owner, point):
            self.take(self.broker_of(failure.role), failure.deed)
            self.result.occurred = 1
            if failure.kill:
                owner.kill()
                self.own(self._operations)
            owner.go()
        if self.suspended:
            self.after(self._back_after_s, self.bring_back)
        self.pump(self.all_ended)


class Stale(InCluster):
    """A settler asks the leader of a partition; it hears of it when another leader, owner and transaction have followed.

    Args:
        slot: Where it runs.
        answered: Whether the old leader has answered before it went, or answers when it comes back.
    """

    def __init__(self, slot: Slot, *, answered: bool) -> None:
        super().__init__(slot)
        self._settings["socket.timeout.ms"] = 50_000  # the settler waits for the old leader's word
        self._answered = answered

    def open(self, closed_later: contextlib.ExitStack) -> None:
        self.proxies = {
            broker: closed_later.enter_context(KafkaProxy(self.context.kafka, broker=broker))
            for broker in range(1, BROKERS + 1)
        }

    def ways(self) -> tuple[dict[str, str], str]:
        through = ",".join(proxy.client_config()["bootstrap.servers"] for proxy in self.proxies.values())
        return {"bootstrap.servers": through}, self.context.url

    def play(self) -> None:
        dead = self.own((Operation(), Operation()), "1:write.decided")
        if not self.until_at(dead, "1:write.decided"):
            return
        dead.kill()
        old = leader(self.admin, self.topic, 0)
        choice = self.proxies[old].on(Api.DESCRIBE_PRODUCERS)
        held = choice.hold_answer() if self._answered else choice.hold_request()
        settler = self.own((Operation(),))
        self.pump(lambda: bool(held.taken) or settler.ended)
        if self._answered:
            held.wait_answered(timeout_s=60)
        self.take(old, "kill" if self._answered else "suspend")
        self._settings = {**self._settings, **PATIENT}
        follower = self.own((Operation(), Operation()))
        self.pump(lambda: follower.ended)
        self.note(f"the leader was {old} and is {leader(self.admin, self.topic, 0)}")
        if not self._answered:
            self.bring_back()
        held.release()
        self.result.occurred = 1
        self.pump(self.all_ended)


class Leaderless(InCluster):
    """A partition has no leader while a dual write or a settling goes on; its broker was suspended, and goes on later."""

    def __init__(self, slot: Slot, seed: int) -> None:
        super().__init__(slot)
        rng = random.Random(f"leaderless {seed}")
        self.point = rng.choice(POINTS)
        # Nothing is decided at the point of an operation that aborts, and what follows takes its turn to abort.
        aborts = self.point in {"write.begun", "write.produced"} and rng.random() < 0.5
        self._operations = (
            Operation(),
            Operation(abort=aborts),
            Operation(abort=rng.random() < 0.5),
            *[Operation()] * rng.choice((0, 1)),
        )
        self._broker = rng.choice((2, 3))
        self._back_after_s = rng.choice([0.2, 2.0, 5.0])
        self._kills = rng.random() < 0.25
        self.topic = f"alone-{seed}-{self.transactional_id}"
        topic = NewTopic(self.topic, 2, replica_assignment=[[2], [3]], config={"min.insync.replicas": "1"})
        self.admin.create_topics([topic])[self.topic].result(RECOVERS_S)
        self._until_led_by(2, 3)

    def _until_led_by(self, *wanted: int) -> None:
        deadline = Deadline(RECOVERS_S)
        while self._leaders() != list(wanted):
            if deadline.expired:
                raise Unavailable(f"the partitions are not led by {wanted} after {RECOVERS_S:g} s")
            time.sleep(0.1)

    def _leaders(self) -> list[int]:
        try:
            partitions = self.admin.list_topics(self.topic, timeout=3).topics[self.topic].partitions
        except KafkaException:  # asked the one that is suspended
            return []
        return [partition.leader for partition in partitions.values()]

    def play(self) -> None:
        if self.point in SETTLING:
            dead = self.own(self._operations, "1:write.decided")
            if self.until_at(dead, "1:write.decided"):
                dead.kill()
            point = f"-1:{self.point}"
        else:
            point = f"1:{self.point}"
        owner = self.own(self._operations, point)
        if self.until_at(owner, point):
            self.take(self._broker, "suspend")
            self._until_led_by(*(-1 if broker == self._broker else broker for broker in (2, 3)))
            self.result.occurred = 1
            if self._kills:
                owner.kill()
                self.own(self._operations)
            owner.go()
        self.after(self._back_after_s, self.bring_back)
        self.pump(self.all_ended)

    def _judge(self) -> None:
        kafka = self.context.kafka.client_config()
        recover(self.transactional_id, kafka=kafka, database=self.context.engine, timeout_s=RECOVERS_S)
        if hanging := abort_hanging(kafka, self.topic, 2):
            self.note(f"undecided, aborted as an operator does: {hanging}")
        super()._judge()
        self.context.kafka.delete_topic(self.topic)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.cluster", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many (100)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--engine", choices=["native", "librdkafka"], default="native", help="of the producers")
    parser.add_argument("--stop-after-s", type=float, default=float("inf"), help="begin no case after that time")
    parser.add_argument("--log", type=Path, help="where each result goes as a line of JSON; see faults.page")
    options = parser.parse_args()
    began, wrong, played = time.monotonic(), 0, 0
    with three_brokers(options.engine) as context, contextlib.closing(Slot(context, 0)) as slot:
        for seed in range(options.first_seed, options.first_seed + options.cases):
            if time.monotonic() - began > options.stop_after_s:
                break
            name, result = play(slot, seed)
            played += 1
            wrong += bool(result.findings)
            show_story(f"{name}, seed {seed}", result)
            if options.log is not None:
                keep_line(options.log, f"three brokers: {name}", seed, result, options.engine)
    sys.stdout.write(f"{played} cases, {wrong} with findings, {time.monotonic() - began:.0f} s\n")
    return 1 if wrong else 0


def play(slot: Slot, seed: int) -> tuple[str, Result]:
    """Every tenth case is about a stale answer, and three of ten about a partition without a leader."""
    if seed % 10 in {1, 4, 7}:
        case = Leaderless(slot, seed)
        return f"suspend leader of a partition without replicas at {case.point}", case.run()
    if seed % 10 == 9:
        answered = seed % 20 == 9
        return f"stale {'answer' if answered else 'leader'}", Stale(slot, answered=answered).run()
    failure = Failure.drawn(seed)
    return str(failure), Failover(slot, failure, seed).run()


if __name__ == "__main__":
    sys.exit(main())
