"""The stage of every case: servers, proxies of its own, owners in processes of their own, and a pump that waits for all."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from confluent_kafka.admin import AdminClient
from sqlalchemy import Engine, create_engine

from dualwrite.kafka.config import EngineName
from dualwrite.migrations import upgrade
from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres, KafkaProxy, PostgresProxy
from faults.sent import by_version, not_native
from faults.verdict import compare, settle_twice
from faults.work import OPERATIONS, PARTITIONS, Job, Operation, serve

TICK_S = 0.02
CASES_PER_TOPIC = 40
# What is dropped is asked for again after a second; with librdkafka a call of 0.4 s is one that may have been sent twice.
IMPATIENT: dict[str, object] = {
    "socket.timeout.ms": 1000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "socket.connection.setup.timeout.ms": 5000,
}
OF_LIBRDKAFKA: dict[str, object] = {"retry.backoff.ms": 500, "retry.backoff.max.ms": 1000, "log_level": 0}
"""The native engine knows by the broker's answer what was sent twice, and logs as Python does."""


class Stuck(Exception):
    """Something did not end in time."""


@dataclass
class OwnerContext:
    """The servers of a run, the producers' engine, and what its cases share."""

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    producer_engine: EngineName
    url: str

    @classmethod
    def prepare(cls, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, producer_engine: EngineName) -> OwnerContext:
        """Make a database on servers that were started."""
        url = postgres.create_database(f"faults_{secrets.token_hex(4)}")
        context = cls(kafka, postgres, producer_engine, url)
        with context.engine.connect() as connection:
            upgrade(connection)
        OPERATIONS.create(context.engine)
        return context

    @cached_property
    def engine(self) -> Engine:
        return create_engine(self.url, pool_size=20)

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient(self.kafka.client_config())

    @cached_property
    def processes(self) -> multiprocessing.context.BaseContext:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults.work", "faults.run"])
        return context

    def fork(self) -> tuple[BaseProcess, Connection]:
        """A process that waits for jobs, and the pipe to it."""
        ours, theirs = self.processes.Pipe()
        process = self.processes.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        self.engine.dispose()


class Slot:
    """Runs one case at a time, with a proxy of its own in front of the broker, and a topic for some of them.

    Args:
        context: The servers.
        number: Which of the broker's proxies.
    """

    def __init__(self, context: OwnerContext, number: int) -> None:
        self.context = context
        self.number = number
        self.idle: list[tuple[BaseProcess, Connection]] = []
        """Processes that wait for a job."""
        self._used = 0
        self._topic: str | None = None

    @property
    def topic(self) -> str:
        if self._topic is None or self._used % CASES_PER_TOPIC == 0:
            self._end_topic()
            self._topic = self.context.kafka.create_topic(f"faults-{secrets.token_hex(4)}", PARTITIONS)
        self._used += 1
        return self._topic

    def close(self) -> None:
        """End the processes, delete the topic."""
        for process, pipe in self.idle:
            pipe.close()
            process.join()
        self.idle = []
        self._end_topic()

    def _end_topic(self) -> None:
        if self._topic is not None:
            self.context.kafka.delete_topic(self._topic)
            self._topic = None


class Owner:
    """A process that owns, or wants to own, the id of a case."""

    def __init__(self, slot: Slot, job: Job) -> None:
        self.name = job.name
        self._slot = slot
        self._process, self.pipe = slot.idle.pop() if slot.idle else slot.context.fork()
        self.pipe.send(job)
        self.at: str | None = None
        self.told: list[tuple[str, str]] = []
        self.ended = False
        self.killed = False

    def go(self) -> None:
        """Let it go on from the point where it waits, if it waits."""
        if self.at is None:
            return
        self.at = None
        with contextlib.suppress(BrokenPipeError):  # it was killed; its end is read from the pipe
            self.pipe.send("go")

    def kill(self) -> None:
        if not self.ended:
            self._process.kill()
            self.killed = True

    def listen(self) -> None:
        """Take its next report, which is there, or its end."""
        try:
            word, what = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            word, what = "killed" if self.killed else "died", ""
        self.told.append((word, what))
        if word == "at":
            self.at = what
        self.ended = word in {"end", "killed", "died"}

    def bury(self) -> None:
        """Let the process go: for the next case, if it has come to its end."""
        if not self.killed and self.told[-1:] == [("end", "")]:
            self._slot.idle.append((self._process, self.pipe))
            return
        self._process.kill()
        self._process.join()
        if self.told[-1:] == [("died", "")]:
            self.told[-1] = ("died", f"with {self._process.exitcode}")
        self.pipe.close()


@dataclass
class Result:
    """The result of one case.

    Attributes:
        occurred: How often the fault struck.
        findings: What is wrong.
        told: How often owners were told something.
        sent: How many requests went through the case's proxy, by kind and version.
        story: What happened, with the time of each step.
        seconds: How long it took.
    """

    occurred: int = 0
    findings: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Stage:
    """The base of the cases: owners, the pump, the end.

    Args:
        slot: Where it runs.
        mistake: A planted mistake.
        settings: For the owners' Kafka clients.
    """

    patience_s = 20.0
    """Bounds each call of an owner."""
    bound_s = 90.0
    """How long a case may take. Longer is a hang."""
    fences_itself = False
    """Whether an owner may be fenced although there is no other one."""

    def __init__(self, slot: Slot, *, mistake: str = "", settings: dict[str, object] | None = None) -> None:
        self.slot = slot
        self.context = slot.context
        self.result = Result()
        self.owners: list[Owner] = []
        self.topic = slot.topic
        self.transactional_id = f"case-{secrets.token_hex(6)}"
        self.group = f"group-{self.transactional_id}"
        of_engine = {} if self.context.producer_engine == "native" else OF_LIBRDKAFKA
        self._settings = {**IMPATIENT, **of_engine, **(settings or {})}
        self._mistake = mistake
        self._began = time.monotonic()
        self._deadline = self._began + self.bound_s
        self._later: list[tuple[float, Callable[[], object]]] = []

    def play(self) -> None:
        """The case itself."""
        raise NotImplementedError

    def tick(self) -> None:
        """Called all the time while the case waits."""

    def heal(self) -> None:
        """Let go whatever is held, and disturb nothing any more."""
        raise NotImplementedError

    def open(self, closed_later: contextlib.ExitStack) -> None:
        """Open the proxies."""
        self.kafka = closed_later.enter_context(KafkaProxy(self.context.kafka, number=self.slot.number))
        self.postgres = closed_later.enter_context(PostgresProxy(self.context.postgres))
        closed_later.callback(self._note_sent)

    def _note_sent(self) -> None:
        self.result.sent = by_version(self.kafka.requests)
        if self.context.producer_engine == "native":
            self.result.findings += not_native(self.result.sent)

    def ways(self) -> tuple[dict[str, str], str]:
        """How owners reach Kafka and the database."""
        return self.kafka.client_config(), self.postgres.url(self.context.url)

    def run(self) -> Result:
        """Play, heal, settle twice, compare."""
        try:
            with contextlib.ExitStack() as closed_later:
                self.open(closed_later)
                try:
                    try:
                        self.play()
                    finally:
                        self.heal()  # also after an error: the next case needs all servers
                    self.pump(lambda: all(owner.ended for owner in self.owners))
                except Stuck as stuck:
                    self.result.findings.append(f"hang: {stuck}")
                finally:
                    for owner in self.owners:
                        owner.bury()
            self._judge()
        except Exception as error:  # noqa: BLE001 - of the harness or of what it calls: in any case to be looked at
            self.result.findings.append(f"{type(error).__name__}: {error}")
        self.result.seconds = time.monotonic() - self._began
        return self.result

    def own(self, operations: tuple[Operation, ...], *pauses: str, outbox: str = "never") -> Owner:
        """Start another owner."""
        kafka, url = self.ways()
        job = Job(
            name=f"w{len(self.owners) + 1}",
            kafka={**kafka, **self._settings},
            direct=self.context.kafka.client_config(),
            url=url,
            transactional_id=self.transactional_id,
            topic=self.topic,
            group=self.group,
            operations=operations,
            pauses=frozenset(pauses),
            patience_s=self.patience_s,
            engine=self.context.producer_engine,
            mistake=self._mistake,
            outbox=outbox,
        )
        owner = Owner(self.slot, job)
        self.owners.append(owner)
        self.note(f"{owner.name} starts")
        return owner

    def note(self, what: str) -> None:
        self.result.story.append(f"{time.monotonic() - self._began:6.2f} {what}")

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do it then, while the case waits; at the latest when everything heals."""
        self._later.append((time.monotonic() + seconds, action))

    def pump(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait, listen to the owners, act when it is time. Whether the condition came true.

        Args:
            until: The condition.
            seconds: How long to wait for it; as long as the case may take if None.

        Raises:
            Stuck: The case may not take longer.
        """
        limit = None if seconds is None else time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if limit is not None and now > limit:
                return False
            if now > self._deadline:
                states = {owner.name: owner.told[-3:] for owner in self.owners if not owner.ended}
                raise Stuck(f"not ended after {self.bound_s:g} s: {states}")
            pipes: dict[object, Owner] = {owner.pipe: owner for owner in self.owners if not owner.ended}
            for pipe in wait(list(pipes), TICK_S) if pipes else self._rest():
                owner = pipes[pipe]
                owner.listen()
                self.note(f"{owner.name} {' '.join(owner.told[-1])}")
            self.tick()
            due = [item for item in self._later if item[0] <= time.monotonic()]
            self._later = [item for item in self._later if item not in due]
            for _, action in due:
                action()
        return True

    @staticmethod
    def _rest() -> list[Connection]:
        threading.Event().wait(TICK_S)
        return []

    def act_now(self) -> None:
        """Do everything that was postponed."""
        while self._later:
            self._later.pop()[1]()

    def _judge(self) -> None:
        findings = self.result.findings
        last: dict[str, str] = {}
        for owner in self.owners:
            for word, what in owner.told:
                if word in {"begin", "acknowledged", "aborted", "pending", "fenced", "doubt"}:
                    last[what] = word
                elif word == "unexpected":
                    findings.append(f"{owner.name}: {what}")
                if word not in {"begin", "why", "at"}:
                    self.result.told[word] = self.result.told.get(word, 0) + 1
                if word == "fenced" and len(self.owners) == 1 and not self.fences_itself:
                    findings.append(f"{what} was fenced by nobody")
            if owner.told[-1:] and owner.told[-1][0] == "died":
                findings.append(f"{owner.name} has died: {owner.told[-3:]}")
        self.note("all have ended")
        kafka = self.context.kafka.client_config()
        findings += settle_twice(self.transactional_id, kafka, self.context.engine)
        self.note("settled twice")
        findings += compare(
            self.transactional_id,
            self.topic,
            self.group,
            last,
            kafka=kafka,
            engine=self.context.engine,
            admin=self.context.admin,
        )
        self.note("compared")
