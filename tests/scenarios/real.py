"""The stage of real servers: performs scenarios with processes, a broker, a database, and proxies between them."""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from harness.forking import processes
from harness.patience import patient, wait_until
from harness.planting import ENVIRONMENT
from kafka.admin import AbortTransactionSpec, KafkaAdminClient
from kafka.structs import TopicPartition as Place
from sqlalchemy import create_engine, delete, insert, select, text

from dualwrite.clock import Deadline
from dualwrite.kafka.config import KafkaConfig
from dualwrite.kafka.coordinator import KafkaCoordinator
from dualwrite.migrations import upgrade
from dualwrite.protocol.values import TransactionStatus
from dualwrite.stores.sql.store import SqlStateStore
from dualwrite.stores.sql.tables import declare_tables
from dualwrite.testing import Api, KafkaProxy, PostgresProxy, read_committed
from dualwrite.units import KeyedImage, UnitReader
from scenarios.actor import RECORDS_OF_A_UNIT, TRANSACTIONAL_ID, Settings
from scenarios.actor import main as act
from scenarios.language import Scenario, Statement
from scenarios.rows import METADATA, ROWS

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from typing_extensions import Self

    from dualwrite.kafka.config import EngineName
    from dualwrite.testing import EmbeddedKafka, EmbeddedPostgres
    from dualwrite.testing.proxy import Rule

PATIENCE_S = 120.0
TIMEOUT_MS = 6_000
TABLES = declare_tables(None)
REQUESTS = {
    "AddPartitionsToTxn": Api.ADD_PARTITIONS_TO_TXN,
    "DescribeProducers": Api.DESCRIBE_PRODUCERS,
    "DescribeTransactions": Api.DESCRIBE_TRANSACTIONS,
    "EndTxn": Api.END_TXN,
    "InitProducerId": Api.INIT_PRODUCER_ID,
    "Produce": Api.PRODUCE,
    "WriteTxnMarkers": Api.WRITE_TXN_MARKERS,
}
_ACTIONS = {
    ("holds", False): "hold_request",
    ("holds", True): "hold_answer",
    ("loses", False): "drop_request",
    ("loses", True): "drop_answer",
    ("cuts off", False): "reset_request",
    ("cuts off", True): "reset_answer",
    ("repeats", False): "duplicate",
}


class _Player:
    """One actor as its director sees it."""

    def __init__(self, name: str, process: BaseProcess, link: Connection, proxy: PostgresProxy) -> None:
        self.name = name
        self.process = process
        self.link = link
        self.proxy = proxy
        self.rules: list[Rule[Any]] = []
        self.at: str | None = None
        self.busy = False
        self.paused = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        process = psutil.Process(self.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, PATIENCE_S, f"{self.name} does not stop")
        self.paused = True

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False


class RealStage:
    """Performs one scenario. A context manager.

    Args:
        scenario: What to perform.
        engine: The producers' engine.
        kafka: The broker.
        postgres: The database server.
        directory: For the actors' logs.
    """

    def __init__(
        self,
        scenario: Scenario,
        engine: EngineName,
        kafka: EmbeddedKafka,
        postgres: EmbeddedPostgres,
        directory: Path,
    ) -> None:
        self._scenario = scenario
        self._producer_engine = engine
        self._kafka = kafka
        self._postgres = postgres
        self._directory = directory
        self._players: dict[str, _Player] = {}
        self._rules: dict[tuple[str, str], Rule[Any]] = {}
        self._kafka_ids: dict[str, str] = {}
        self._reader: UnitReader[Any] | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            unique = secrets.token_hex(6)
            self._database = f"scenario_{unique}"
            self.url = self._postgres.create_database(self._database)
            stack.callback(self._drop_database)
            self._engine = create_engine(self.url)
            stack.callback(self._engine.dispose)
            with self._engine.connect() as connection:
                upgrade(connection)
            METADATA.create_all(self._engine)
            self.topic = self._kafka.create_topic(f"scenario-{unique}", 2)
            self._narrow = self._kafka.create_topic(f"narrow-{unique}", 1, {"max.message.bytes": "1000"})
            self._proxy = stack.enter_context(KafkaProxy(self._kafka))
            self._store = SqlStateStore(self._engine)
            stack.callback(self._dismiss)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _drop_database(self) -> None:
        if self._postgres.running:
            self._postgres.drop_database(self._database)

    def _dismiss(self) -> None:
        for player in self._players.values():
            player.process.kill()
            player.process.join()
            player.link.close()
            player.proxy.__exit__(None, None, None)

    def perform(self, statement: Statement) -> None:
        """Do it, or check it."""
        getattr(self, statement.verb)(**statement.arguments)

    # The actors

    def opens(self, actor: str, lanes: str | None, outbox: str | None, **how: str | None) -> None:
        self._order(actor, how, "opens", lanes=int(lanes or 1), outbox=outbox is not None)

    def writes(self, actor: str, label: str, aborts: str | None, **how: str | None) -> None:
        self._order(actor, how, "writes", label=label, aborts=aborts is not None)

    def writes_badly(self, actor: str, label: str, fault: str, **how: str | None) -> None:
        self._order(actor, how, "writes", label=label, fault=fault)

    def opens_units(self, actor: str, **how: str | None) -> None:
        self._order(actor, how, "opens_units")

    def writes_unit(self, actor: str, label: str, **how: str | None) -> None:
        self._order(actor, how, "writes_unit", label=label)

    def recovers(self, actor: str, after_restore: str | None, **how: str | None) -> None:
        self._order(actor, how, "recovers", after_restore=after_restore is not None)

    def closes(self, actor: str, **how: str | None) -> None:
        self._order(actor, how, "closes")

    def goes_on(self, actor: str, **how: str | None) -> None:
        player = self._players[actor]
        assert player.at is not None, f"{actor} stands at no point"
        self._send(player, how, {})

    def ends(self, actor: str, **how: str | None) -> None:
        player = self._players[actor]
        assert player.busy, f"{actor} does nothing"
        self._follow(player, how)

    def others_go_on(self, actor: str) -> None:
        """Its process wakes up; the thread that stands at a point stays there."""
        player = self._players[actor]
        assert player.at is not None, f"{actor} stands at no point"
        player.wake()

    def has_to_wait(self, actor: str) -> None:
        player = self._players[actor]
        self._until(lambda: player.link.poll(0.01) or self._is_blocked(player), f"{actor} neither ended nor waits")
        assert not player.link.poll(0), f"{actor} did not have to wait: {player.link.recv()}"

    def is_killed(self, actor: str) -> None:
        player = self._players.pop(actor)
        player.process.kill()
        player.process.join()
        player.link.close()
        player.proxy.__exit__(None, None, None)

    def is_paused(self, actor: str) -> None:
        self._players[actor].pause()

    def wakes_up(self, actor: str) -> None:
        self._players[actor].wake()

    def _order(self, name: str, how: dict[str, str | None], do: str, **arguments: object) -> None:
        player = self._players.get(name) or self._appear(name)
        assert not player.busy, f"{name} has not come to the end of what it does"
        self._send(player, how, {"do": do, "with": arguments})

    def _appear(self, name: str) -> _Player:
        proxy = PostgresProxy(self._postgres)
        proxy.__enter__()
        context = processes()
        ours, theirs = context.Pipe()
        process = context.Process(target=act, args=(theirs, self._settings(name, proxy)), daemon=True)
        process.start()
        theirs.close()
        player = _Player(name, process, ours, proxy)
        self._players[name] = player
        return player

    def _settings(self, name: str, proxy: PostgresProxy) -> Settings:
        through_proxy = self._proxy.client_config()
        kafka: dict[str, object] = {**patient(through_proxy, self._producer_engine), "client.id": name}
        limits: dict[str, float] = {"fallback_after_s": 3.0}  # a busy machine is no silence
        if "a hasty broker" in self._scenario.given:
            kafka["transaction.timeout.ms"] = TIMEOUT_MS
            limits["margin_s"] = 1.0
        if "eager retries" in self._scenario.given:
            kafka |= {"retry.backoff.ms": 500, "retry.backoff.max.ms": 500}
        if "short deadlines" in self._scenario.given:
            limits["timeout_s"] = 8.0
        if "short sessions" in self._scenario.given:
            limits["paused_owner_timeout_s"] = 2.0
        url = f"{proxy.url(self.url)}?application_name={name}"
        log = str(self._directory / f"{name}.log")
        mistake = os.environ.get(ENVIRONMENT)
        return Settings(name, kafka, url, self.topic, self._narrow, log, self._producer_engine, limits, mistake)

    def _send(self, player: _Player, how: dict[str, str | None], order: dict[str, object]) -> None:
        player.link.send({**order, "point": how["point"], "nth": int(how["nth"] or 1)})
        player.at, player.busy = None, True
        if player.paused:
            player.wake()
        self._follow(player, how)

    def _follow(self, player: _Player, how: dict[str, str | None]) -> None:
        """Wait until the actor stands where it should, has ended as it should, or waits for a lock or the network."""
        if how["waits"]:
            self._until(lambda: player.link.poll(0.01) or self._waits(player), f"{player.name} neither ended nor waits")
            assert not player.link.poll(0), f"{player.name} did not have to wait: {player.link.recv()}"
            return
        word = self._word_of(player)
        if how["else_told"] and word.get("told") == how["else_told"]:
            player.busy = False
            return
        if how["point"]:
            assert word.get("at") == how["point"], f"{player.name} came not to {how['point']} but to this: {word}"
            player.at = how["point"]
            player.pause()
            return
        assert "ended" in word, f"{player.name} {word}"
        player.busy = False
        expected = how["told"].split(" or ") if how["told"] else [None]
        assert word["told"] in expected, f"{player.name} was told {word['told']}, not {how['told']}: {word['words']}"

    def _word_of(self, player: _Player) -> dict[str, Any]:
        assert player.link.poll(PATIENCE_S), f"{player.name} says nothing"
        try:
            word: dict[str, Any] = player.link.recv()
        except EOFError:
            raise AssertionError(f"{player.name} died") from None
        for row in self._store.read([TRANSACTIONAL_ID]):
            name, _, _ = row.owner.partition(" ")  # what makes it unique stands behind it
            self._kafka_ids[name] = row.kafka_id(row.incarnation)
        return word

    def _waits(self, player: _Player) -> bool:
        """Whether the network holds something of the actor's, or another session its lock."""
        return any(rule.taken for rule in player.rules) or self._is_blocked(player)

    def asks_in_vain(self, actor: str) -> None:
        player, log = self._players[actor], self._directory / f"{actor}.log"
        self._until(
            lambda: player.link.poll(0.01) or "asking the database again" in log.read_text(), f"{actor} asks nobody"
        )
        assert not player.link.poll(0), f"{actor} gave up: {player.link.recv()}"

    def _is_blocked(self, player: _Player) -> bool:
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
            "AND application_name = :name"
        )
        with self._engine.connect() as connection:
            return bool(connection.scalar(waiting, {"name": player.name}))

    @staticmethod
    def _until(condition: Callable[[], object], otherwise: str, timeout_s: float = PATIENCE_S) -> None:
        wait_until(condition, timeout_s, otherwise)

    # The network

    def network(self, does: str, answer: str | None, actor: str, request: str) -> None:
        action = _ACTIONS[does, answer is not None]
        if actor == "the broker":
            rule = getattr(self._proxy.on(REQUESTS[request]), action)()
        else:
            player = self._players.get(actor) or self._appear(actor)
            of_kafka = request in REQUESTS
            choice = self._proxy.on(REQUESTS[request], client_id=actor) if of_kafka else player.proxy.on(request)
            rule = getattr(choice, action)()
            if does == "holds":
                player.rules.append(rule)
        what = {"holds": "held answer to" if answer else "held", "repeats": "repeated"}.get(does, does)
        self._rules[what, request] = rule

    def is_held(self, request: str) -> None:
        self._rules["held", request].wait(PATIENCE_S)

    def arrives(self, what: str, request: str) -> None:
        rule = self._rules.pop((what, request))
        rule.wait(PATIENCE_S)
        rule.release()
        for player in self._players.values():
            player.rules = [kept for kept in player.rules if kept is not rule]
        if what != "held answer to":
            rule.wait_answered(2 if what == "repeated" else 1, PATIENCE_S)

    def is_lost(self, what: str, request: str) -> None:
        rule = self._rules.pop((what, request))
        rule.wait(PATIENCE_S)
        rule.discard()

    def connection_breaks(self, request: str) -> None:
        (rule,) = [rule for (_, name), rule in self._rules.items() if name == request]
        rule.wait(PATIENCE_S)
        rule.cut()
        for player in self._players.values():
            player.rules = [kept for kept in player.rules if kept is not rule]

    # The broker

    def falls_silent(self) -> None:
        """Every request is held, until it answers again: those that were sent meanwhile arrive late."""
        self._silence = self._proxy.on(nth=None).hold_request()

    def answers_again(self) -> None:
        self._silence.withdraw()
        self._silence.release()

    def _status(self, actor: str) -> TransactionStatus:
        kafka_id = self._kafka_ids[actor]
        with closing(KafkaCoordinator(KafkaConfig.parse(self._kafka.client_config()))) as coordinator:
            return coordinator.describe([kafka_id], Deadline(30))[kafka_id].status

    def broker_times_out(self, actor: str) -> None:
        gone = {TransactionStatus.COMPLETE_ABORT, TransactionStatus.NO_SUCH_ID}
        self._until(lambda: self._status(actor) in gone, f"{actor}'s transaction is never timed out")

    def broker_forgets(self, actor: str) -> None:
        self._until(lambda: self._status(actor) is TransactionStatus.NO_SUCH_ID, f"{actor}'s id is never forgotten")

    def operator_aborts(self, actor: str) -> None:
        config = {**self._kafka.client_config(), "transactional.id": self._kafka_ids[actor], "log_level": 0}
        # In the background: the network may hold the markers, and then it comes to no end.
        thread = threading.Thread(target=lambda: Producer(config).init_transactions(PATIENCE_S))
        thread.start()
        self._cleanup.callback(thread.join)
        self._until(
            lambda: self._status(actor) is not TransactionStatus.ONGOING, f"{actor}'s transaction is not aborted"
        )

    def operator_marks(self, actor: str) -> None:
        (row,) = self._store.read([TRANSACTIONAL_ID])
        assert row.kafka_id(row.incarnation) == self._kafka_ids[actor]
        with closing(KafkaAdminClient(bootstrap_servers=self._kafka.bootstrap_servers)) as admin:
            for partition in (0, 1):
                place = Place(self.topic, partition)
                admin.abort_transaction(AbortTransactionSpec(place, row.prepared.producer_id, row.prepared.epoch))

    def records_deleted(self) -> None:
        admin = AdminClient(self._kafka.client_config())
        for future in admin.delete_records(
            [TopicPartition(self.topic, partition, -1) for partition in (0, 1)]
        ).values():
            future.result(120)

    def topic_made_anew(self) -> None:
        self._kafka.delete_topic(self.topic)
        self._kafka.create_topic(self.topic, 2)

    def broker_is_killed(self) -> None:
        self._kafka.kill()
        self._kafka.restart()

    # The database

    def database_is_killed(self) -> None:
        self.database_stops()
        self.database_starts()

    def database_stops(self) -> None:
        self._postgres.kill()

    def database_starts(self) -> None:
        self._postgres.restart()
        self._engine.dispose()

    def database_ends_session(self, actor: str) -> None:
        end = text(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name = :name"
        )
        with self._engine.connect() as connection:
            assert connection.scalar(end, {"name": actor}), f"{actor} has no session"

    def database_backed_up(self) -> None:
        with self._engine.connect() as connection:
            self._backup = {table: connection.execute(select(table)).mappings().all() for table in (TABLES.state, ROWS)}

    def database_restored(self) -> None:
        with self._engine.begin() as connection:
            for table, rows in self._backup.items():
                connection.execute(delete(table))
                if rows:
                    connection.execute(insert(table), [dict(row) for row in rows])

    def row_deleted(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(TABLES.state))

    # What is seen

    def database_shows(self, labels: str) -> None:
        with self._engine.connect() as connection:
            found = sorted(connection.execute(select(ROWS.c.label)).scalars())
        assert found == _labels(labels), f"the database shows {found}"

    def kafka_shows(self, labels: str) -> None:
        for partition, found in enumerate(self._in_kafka()):
            assert sorted(found) == _labels(labels), f"partition {partition} shows {sorted(found)}"

    def kafka_comes_to_show(self, labels: str) -> None:
        wanted = [_labels(labels)] * 2
        self._until(lambda: [sorted(found) for found in self._in_kafka()] == wanted, f"Kafka never shows {labels}")

    def kafka_shows_in_order(self, labels: str) -> None:
        for partition, found in enumerate(self._in_kafka()):
            assert found == labels.split(), f"partition {partition} shows {found}"

    def _in_kafka(self) -> list[list[str]]:
        """Of each partition, in order."""
        records = read_committed(self._kafka.client_config(), self.topic, timeout_s=60)
        return [[(one.value or b"").decode() for one in records if one.partition == partition] for partition in (0, 1)]

    def both_show(self, labels: str) -> None:
        self.database_shows(labels)
        self.kafka_shows(labels)

    def waits_in_database(self, labels: str) -> None:
        for partition, found in enumerate(self._waiting()):
            assert found == _labels(labels), f"of partition {partition}, {found} wait in the database"

    def _waiting(self) -> list[list[str]]:
        table = TABLES.outbox
        with self._engine.connect() as connection:
            found = connection.execute(select(table.c.topic_partition, table.c.value)).all()
        return [sorted(bytes(value).decode() for at, value in found if at == partition) for partition in (0, 1)]

    def nothing_waits(self) -> None:
        mode = select(TABLES.mode.c.mode).where(TABLES.mode.c.writer == TRANSACTIONAL_ID)

        def is_over() -> bool:
            with self._engine.connect() as connection:
                return connection.scalar(mode) == "direct" and self._waiting() == [[], []]

        self._until(is_over, f"still waiting in the database: {self._waiting()}")

    def units_shown(self, labels: str) -> None:
        """One reader, which goes on where it has read to."""
        if self._reader is None:
            reader = UnitReader(self.topic, kafka=self._kafka.client_config(), image=KeyedImage())
            self._reader = self._cleanup.enter_context(reader)
        self._reader.catch_up(PATIENCE_S)
        found = Counter(value.decode() for value in self._reader.snapshot().contents.values())
        assert found == dict.fromkeys(_labels(labels), RECORDS_OF_A_UNIT), f"the reader shows {found}"

    def unit_aborted(self, reason: str) -> None:
        records = read_committed(self._kafka.client_config(), self.topic, timeout_s=60)
        aborts = [record.value or b"" for record in records if reason.encode() in (record.value or b"")]
        assert aborts, f"no marker says {reason!r}"

    def recorded(self, outcome: str, labels: str) -> None:
        found = [incident for incident in self._store.incidents() if incident.outcome.value == outcome]
        assert len(found) == len(_labels(labels)), f"recorded as {outcome}: {found}"


def _labels(text: str) -> list[str]:
    return [] if text == "nothing" else sorted(re.split(r"\s+", text))
