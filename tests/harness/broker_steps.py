"""Steps such as ``("init", "a")`` or ``("end", "a", True)``: actions on a broker, and their results on the simulator.

A sequence of them is played by ``harness.both_brokers`` on the simulator and on a real broker.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.requests import ErrorCode
from simulator.state import Broker, create_topic, new_broker, partition, with_partition

PARTITIONS = 2
SET = 1  # in the place of every time that is set
LONG_MS = 900_000  # a machine may be slow; the broker must not time anything out by itself
GROUP = "g"


class Client(NamedTuple):
    """A user of a transactional id, and the last answer it got. ``sequences``: the next one, by partition."""

    kafka_id: str
    producer_id: int = -1
    epoch: int = -1
    sequences: tuple[int, ...] = (0,) * PARTITIONS
    last: Any = None


class Play(NamedTuple):
    """Where a sequence stands on the simulator."""

    broker: Broker
    clients: tuple[tuple[str, Client], ...]


def begin(clients, *, bases=(0,) * PARTITIONS, coordinator_epoch=0):
    """A play with nothing done yet.

    Args:
        clients: Names, with the transactional id that each uses.
        bases: Where the logs of the partitions stand.
        coordinator_epoch: As the real one's.
    """
    broker = new_broker({"t": PARTITIONS}, offsets_partitions=1)._replace(
        clock_ms=SET, coordinator_epoch=coordinator_epoch
    )
    for number, base in enumerate(bases):
        found = partition(broker, ("t", number))
        broker = with_partition(broker, found._replace(log_start=base, log_end=base))
    return Play(broker, tuple((name, Client(kafka_id)) for name, kafka_id in clients.items()))


def _init(client, timeout_ms=LONG_MS):
    return sim.InitProducerId(client.kafka_id, timeout_ms)


def _reinit(client, ahead=0):
    if client.producer_id < 0:
        return None
    return sim.InitProducerId(client.kafka_id, LONG_MS, client.producer_id, max(0, client.epoch + ahead))


def _init_other(client):
    return sim.InitProducerId(client.kafka_id, LONG_MS, 777, 0)


def _force(client):
    return sim.InitProducerId(client.kafka_id, LONG_MS - 1)


def _add(client, *numbers):
    return sim.AddPartitionsToTxn(
        client.kafka_id, client.producer_id, client.epoch, tuple(("t", number) for number in numbers)
    )


def _add_unknown(client):
    places = (("t", 0), ("no-such-topic", 0))
    return sim.AddPartitionsToTxn(client.kafka_id, client.producer_id, client.epoch, places)


def _add_topic(client, topic):
    return sim.AddPartitionsToTxn(client.kafka_id, client.producer_id, client.epoch, ((topic, 0),))


def _produce(client, number, ahead=0, count=1):
    sequence = max(0, client.sequences[number] + ahead)
    values = tuple(f"{client.kafka_id}:{client.epoch}:{sequence + index}" for index in range(count))
    return sim.Produce(client.kafka_id, client.producer_id, client.epoch, ("t", number), sequence, values)


def _plain(client, number):
    return sim.Produce(None, -1, -1, ("t", number), -1, ("plain",))


def _repeat(client):
    return client.last


def _add_offsets(client):
    return sim.AddOffsetsToTxn(client.kafka_id, client.producer_id, client.epoch, GROUP)


def _commit_offsets(client, offset=5):
    return sim.TxnOffsetCommit(client.kafka_id, GROUP, client.producer_id, client.epoch, ((("t", 0), offset),))


def _end(client, committed, ahead=0):
    return sim.EndTxn(client.kafka_id, client.producer_id, max(0, client.epoch + ahead), committed)


def _mark(client, number, committed, ahead=0, coordinator_epoch=0):
    return sim.WriteTxnMarkers(
        client.producer_id, max(0, client.epoch + ahead), committed, (("t", number),), coordinator_epoch
    )


REQUESTS = {
    "init": _init,
    "reinit": _reinit,
    "init other": _init_other,
    "force": _force,
    "add": _add,
    "add unknown": _add_unknown,
    "add topic": _add_topic,
    "produce": _produce,
    "plain": _plain,
    "repeat": _repeat,
    "add offsets": _add_offsets,
    "commit offsets": _commit_offsets,
    "end": _end,
    "mark": _mark,
    "describe": lambda client: sim.DescribeTransactions(client.kafka_id),
    "list": lambda client, *states: sim.ListTransactions(frozenset(states), frozenset({client.producer_id})),
}
"""The requests of a client: from the client and the step's arguments to the request; None if it makes no sense."""


def _deleted(broker, client, number, before):
    place = ("t", number)
    return environment.delete_records(broker, place, partition(broker, place).log_start + before)


def _forgotten(broker, client):
    for known in broker.transactions:
        broker = environment.expire_transactional_id(broker, known.transactional_id)
        for found in broker.partitions:
            broker = environment.expire_producer(broker, found.topic_partition, known.producer_id)
    return broker


ENVIRONMENT = {
    "time out": lambda broker, client: environment.time_out(broker, client.kafka_id),
    "restart": lambda broker, _: environment.restart(broker),
    "forget": _forgotten,
    "delete records": _deleted,
    "create topic": lambda broker, _, name: create_topic(broker, name, 1),
    "delete topic": lambda broker, _, name: environment.delete_topic(broker, name),
}
"""Events without a request: from the broker, the client and the step's arguments to the next broker."""

WITHOUT_IDS = {"init", "init other", "force", "describe", "plain"}


def request_of(play, step_):
    """The request that a step stands for; None where it is none, or makes no sense yet."""
    verb, name, *arguments = step_
    client = dict(play.clients)[name]
    if verb in ENVIRONMENT or (client.producer_id < 0 and verb not in WITHOUT_IDS):
        return None
    return REQUESTS[verb](client, *arguments)


def step(play, step_):
    """Play one step on the simulator, with the markers that follow. The answer is None where it is no request."""
    verb, name, *arguments = step_
    if verb in ENVIRONMENT:
        broker, answer = ENVIRONMENT[verb](play.broker, dict(play.clients)[name], *arguments), None
    else:
        request = request_of(play, step_)
        if request is None:
            return play, None
        broker, answer = handle(play.broker, request)
        play = _answered(play, step_, request, answer)
    return play._replace(broker=environment.write_markers(broker)), answer


def _answered(play, step_, request, answer):
    name = step_[1]
    client = dict(play.clients)[name]
    if isinstance(request, sim.InitProducerId) and answer.error_code is ErrorCode.NONE:
        client = Client(client.kafka_id, answer.producer_id, answer.producer_epoch, last=client.last)
    elif step_[0] == "produce":
        client = client._replace(last=request)
        if answer.error_code is ErrorCode.NONE and request.partition[0] == "t":
            number = request.partition[1]
            sequences = list(client.sequences)
            sequences[number] = request.base_sequence + len(request.values)
            client = client._replace(sequences=tuple(sequences))
    return play._replace(clients=tuple((other, client if other == name else kept) for other, kept in play.clients))


def _of(names, *steps):
    return [(verb, name, *arguments) for name in names for verb, *arguments in steps]


_ENDS = (("end", True), ("end", False))
ALPHABETS = {
    "two producers of one id": (
        {"a": "X", "b": "X"},
        [
            *_of("ab", ("init",), ("add", 0), ("produce", 0), *_ENDS),
            *_of("a", ("reinit",), ("reinit", -1), ("reinit", 2), ("init other",), ("repeat",), ("produce", 0, 1)),
            *_of("a", ("mark", 0, False), ("mark", 0, True), ("add", 0, 1), ("produce", 1)),
        ],
    ),
    "two ids": (
        {"a": "X", "c": "Y"},
        [*_of("ac", ("init",), ("force",), ("add", 0), ("produce", 0), *_ENDS), ("plain", "a", 0)],
    ),
    "offsets": (
        {"a": "X", "b": "X"},
        [
            *_of("ab", ("init",), ("add offsets",), ("commit offsets",), *_ENDS),
            *_of("a", ("add", 0), ("produce", 0), ("commit offsets", 7), ("add unknown",)),
        ],
    ),
    # A marker of a later coordinator makes the coordinator's own one be refused: PrepareCommit and PrepareAbort stay.
    "prepared for long": (
        {"a": "X", "b": "X"},
        [
            *_of("ab", ("init",), ("add", 0, 1), ("produce", 0), ("produce", 1), *_ENDS),
            *_of("a", ("mark", 1, True, 0, 1000), ("mark", 1, False, 1), ("mark", 0, False, 2)),
            *_of("a", ("reinit",), ("init other",), ("repeat",)),
            *_of("b", ("reinit", -1)),
        ],
    ),
}
"""Clients with their ids, and the steps that are tried in every state."""

EVERYTHING = sorted(
    {*(step_ for _, steps in ALPHABETS.values() for step_ in steps), *_of("bc", ("reinit",), ("repeat",))}
)
EVERYBODY = {"a": "X", "b": "X", "c": "Y"}


def transition_cover(alphabet, clients, depth):
    """Sequences that try every step in every state that the simulator reaches in fewer than ``depth`` steps.

    Steps that change nothing on the simulator are tried one after the other in one sequence: what they change on the real
    broker still shows.
    """
    start = begin(clients)
    seen = {start}
    level = [((), start)]
    found = []
    for _ in range(depth):
        following = []
        for path, play in level:
            idle = []
            for step_ in alphabet:
                after, _ = step(play, step_)
                if request_of(play, step_) is None:
                    continue
                if after == play:
                    idle.append(step_)
                    continue
                if after in seen:
                    found.append((*path, step_))
                else:
                    seen.add(after)
                    following.append(((*path, step_), after))
            if idle:
                found.append((*path, *idle))
        level = following
    return found + [path for path, _ in level]


def random_sequences(count, length, seed):
    """Sequences over all alphabets' steps, of three clients on two ids."""
    rng = random.Random(seed)
    return [tuple(rng.choices(EVERYTHING, k=length)) for _ in range(count)]
