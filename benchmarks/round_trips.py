"""The requests of one warm dual write, counted at proxies in front of both servers."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack

import pytest
from sqlalchemy import create_engine

from benchmarks import network
from benchmarks.servers import Ground
from benchmarks.ways import METADATA
from dualwrite.clock import Deadline
from dualwrite.kafka.transaction_ends import PendingEnd
from dualwrite.testing.proxy import Api, KafkaProxy, PostgresProxy
from dualwrite.writing.lane import Lane

_KAFKA, _POSTGRESQL = "Kafka: ", "PostgreSQL: "
_OTHERS = {8: "OffsetCommit", 18: "ApiVersions", 23: "OffsetForLeaderEpoch"}
_WARM_UP = 20


def count(ground: Ground, operations: int) -> dict[str, dict[str, dict[str, float]]]:
    """By way: the mean numbers of requests that a call sends, and of those sent in the background after it."""
    topic = ground.topic(1)
    with ExitStack() as stack:
        kafka = stack.enter_context(KafkaProxy(ground.kafka_server))
        postgres = stack.enter_context(PostgresProxy(ground.postgres))
        watched: list[Lane] = []
        come_to_rest = Lane.come_to_rest

        def note(lane: Lane) -> PendingEnd | None:  # else the question might be sent before the call has returned
            watched.append(lane)
            return lane.pending_end

        stack.enter_context(pytest.MonkeyPatch.context()).setattr(Lane, "come_to_rest", note)
        engine = create_engine(postgres.url(ground.url))
        stack.callback(engine.dispose)
        METADATA.create_all(engine)
        ways = network.enter(stack, kafka.client_config(), engine, topic)

        def asked() -> Counter[str]:
            found = Counter(_KAFKA + _api(request.api_key) for request in kafka.requests)
            found.update(_POSTGRESQL + _named(request.statements) for request in postgres.requests)
            return found

        counted = {name: {"in the call": Counter[str](), "after it": Counter[str]()} for name in ways}
        for number in range(_WARM_UP + operations):
            for name, write in ways.items():
                watched.clear()
                before = asked()
                write([f"{name} {number}"])
                returned = asked()
                for lane in watched:
                    come_to_rest(lane)
                    lane.know_end(Deadline(30))
                if number >= _WARM_UP:
                    counted[name]["in the call"] += returned - before
                    counted[name]["after it"] += asked() - returned
    return {
        name: {when: {what: times / operations for what, times in found.items()} for when, found in by.items()}
        for name, by in counted.items()
    }


def _api(key: int) -> str:
    try:
        return "".join(part.title() for part in Api(key).name.split("_"))
    except ValueError:
        return _OTHERS.get(key, f"API {key}")


def _named(statements: tuple[str, ...]) -> str:
    return "; ".join(_short(statement) for statement in statements)


def _short(statement: str) -> str:
    """The verb and the table."""
    verb = statement.split(" ", 1)[0]
    found = re.search(r"\b(?:FROM|INTO|UPDATE) ([A-Z_.\"]+)", statement)
    if verb == "BEGIN":  # its isolation is no news
        return verb
    return f"{verb} {found[1].lower()}" if found else " ".join(statement.split()[:3])
