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
from simulator.state import Broker, create_topic, new_broker, partition, transaction, with_partition, with_transaction

PARTITIONS = 2
SET = 1  # in the place of every time that is set
LONG_MS = 900_000  # a machine may be slow; the broker must not time anything out by itself
GROUP = "g"
LAST_EPOCH = 32_766  # the next one only fences


class Client(NamedTuple):
    """A user of a transactional id, and the last answer it got. ``sequences``: the next one, by partition.

    ``version`` is that of its transactions. ``last`` is its last ``Produce``, ``end`` its last ``EndTxn``.
    """

    kafka_id: str
    producer_id: int = -1
    epoch: int = -1
    sequences: tuple[int, ...] = (0,) * PARTITIONS
    last: Any = None
    version: int = 1
    end: Any = None


class Play(NamedTuple):
    """Where a sequence stands on the simulator."""

    broker: Broker
    clients: tuple[tuple[str, Client], ...]


def begin(clients, *, bases=(0,) * PARTITIONS, coordinator_epoch=0, settings=None):
    """A play with nothing done yet.

    Args:
        clients: Names, with the transactional id that each uses, or with a client.
        bases: Where the logs of the partitions stand.
        coordinator_epoch: As the real one's.
        settings: Of the broker, as `new_broker` takes them.
    """
    broker = new_broker({"t": PARTITIONS}, offsets_partitions=1, transaction_version=2, **(settings or {}))._replace(
        clock_ms=SET, coordinator_epoch=coordinator_epoch
    )
    for number, base in enumerate(bases):
        found = partition(broker, ("t", number))
        broker = with_partition(broker, found._replace(log_start=base, log_end=base))
    return Play(
        broker,
        tuple((name, Client(client) if isinstance(client, str) else client) for name, client in clients.items()),
    )


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
    return sim.Produce(
        client.kafka_id, client.producer_id, client.epoch, ("t", number), sequence, values, client.version
    )


def _plain(client, number):
    return sim.Produce(None, -1, -1, ("t", number), -1, ("plain",))


def _repeat(client):
    return client.last


def _repeat_end(client):
    return client.end


def _late(client, number):
    """A copy of the first message of the transaction before this one, to a partition that it need not have reached."""
    epoch = client.epoch - 1
    values = (f"{client.kafka_id}:{epoch}:0",)
    return epoch >= 0 and sim.Produce(
        client.kafka_id, client.producer_id, epoch, ("t", number), 0, values, client.version
    )


def _add_offsets(client):
    return sim.AddOffsetsToTxn(client.kafka_id, client.producer_id, client.epoch, GROUP)


def _commit_offsets(client, offset=5):
    offsets = ((("t", 0), offset),)
    return sim.TxnOffsetCommit(client.kafka_id, GROUP, client.producer_id, client.epoch, offsets, client.version)


def _late_offsets(client):
    return _commit_offsets(client._replace(epoch=max(0, client.epoch - 1)), 3)


def _end(client, committed, ahead=0):
    return sim.EndTxn(client.kafka_id, client.producer_id, max(0, client.epoch + ahead), committed, client.version)


def _mark(client, number, committed, ahead=0, coordinator_epoch=0):
    return sim.WriteTxnMarkers(
        client.producer_id, max(0, client.epoch + ahead), committed, (("t", number),), coordinator_epoch, client.version
    )


REQUESTS = {
    "init": _init,
    "init 2pc": lambda client, timeout_ms: _init(client, timeout_ms)._replace(enable_2pc=True),
    "reinit": _reinit,
    "init other": _init_other,
    "force": _force,
    "add": _add,
    "add unknown": _add_unknown,
    "add topic": _add_topic,
    "produce": _produce,
    "plain": _plain,
    "repeat": _repeat,
    "repeat end": _repeat_end,
    "late": _late,
    "add offsets": _add_offsets,
    "commit offsets": _commit_offsets,
    "late offsets": _late_offsets,
    "end": _end,
    "mark": _mark,
    "describe": lambda client: sim.DescribeTransactions(client.kafka_id),
    "list": lambda client, *states: sim.ListTransactions(frozenset(states), frozenset({client.producer_id})),
}
"""The requests of a client: from the client and the step's arguments to the request; None if it makes no sense."""


def _deleted(broker, client, number, before):
    place = ("t", number)
    return environment.delete_records(broker, place, partition(broker, place).log_start + before)


def _near_its_last_epoch(broker, client, left):
    known = transaction(broker, client.kafka_id)
    if known is None:
        return broker
    return with_transaction(broker, known._replace(producer_epoch=LAST_EPOCH - left, last_producer_epoch=-1))


def _forgotten(broker, client):
    for known in broker.transactions:
        broker = environment.expire_transactional_id(broker, known.transactional_id)
        for found in broker.partitions:
            broker = environment.expire_producer(broker, found.topic_partition, known.producer_id)
    return broker


ENVIRONMENT = {
    "near the last epoch": _near_its_last_epoch,
    "time out": lambda broker, client: environment.time_out(broker, client.kafka_id),
    "restart": lambda broker, _: environment.restart(broker),
    "forget": _forgotten,
    "delete records": _deleted,
    "create topic": lambda broker, _, name: create_topic(broker, name, 1),
    "delete topic": lambda broker, _, name: environment.delete_topic(broker, name),
}
"""Events without a request: from the broker, the client and the step's arguments to the next broker."""

WITHOUT_IDS = {"init", "init 2pc", "init other", "force", "describe", "plain"}


def request_of(play, step_):
    """The request that a step stands for; None where it is none, or makes no sense yet."""
    verb, name, *arguments = step_
    client = dict(play.clients)[name]
    if verb in ENVIRONMENT or (client.producer_id < 0 and verb not in WITHOUT_IDS):
        return None
    return REQUESTS[verb](client, *arguments) or None


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
        client = Client(
            client.kafka_id, answer.producer_id, answer.producer_epoch,
            last=client.last, version=client.version, end=client.end,
        )  # fmt: skip
    elif isinstance(answer, sim.EndTxnResponse) and step_[0] == "end":
        client = client._replace(end=request)
        if answer.error_code is ErrorCode.NONE:
            client = client._replace(
                producer_id=answer.producer_id, epoch=answer.producer_epoch, sequences=(0,) * PARTITIONS
            )
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

_A, _B, _C = (Client(kafka_id, version=2) for kafka_id in "XXY")
_LATE = (("repeat",), ("repeat end",), ("late", 0), ("late", 1), ("end", True, -1), ("end", False, -1))
ALPHABETS_V2 = {
    "two producers of one id": (
        {"a": _A, "b": _B},
        [
            *_of("ab", ("init",), ("produce", 0), *_ENDS, ("repeat end",)),
            *_of("a", *_LATE, ("produce", 1), ("produce", 0, 1), ("add", 0, 1)),
            *_of("a", ("reinit",), ("reinit", -1), ("reinit", 2), ("init other",)),
            *_of("a", ("mark", 0, False), ("mark", 0, True, 1)),
        ],
    ),
    "two ids": (
        {"a": _A, "c": _C},
        [*_of("ac", ("init",), ("force",), ("produce", 0), *_ENDS, *_LATE), ("plain", "a", 0)],
    ),
    "offsets": (
        {"a": _A, "b": _B},
        [
            *_of("ab", ("init",), ("commit offsets",), *_ENDS),
            *_of("a", ("add offsets",), ("produce", 0), ("commit offsets", 7), ("late offsets",), ("repeat end",)),
        ],
    ),
    "prepared for long": (
        {"a": _A, "b": _B},
        [
            *_of("ab", ("init",), ("add", 0, 1), ("produce", 0), ("produce", 1), *_ENDS),
            *_of("a", ("mark", 1, True, 0, 1000), ("mark", 1, False, 1), ("mark", 0, False, 2)),
            *_of("a", *_LATE, ("reinit",), ("init other",), ("commit offsets",)),
            *_of("b", ("reinit", -1)),
        ],
    ),
    "an older client of the same id": (
        {"a": _A, "o": "X"},
        [
            *_of("ao", ("init",), ("produce", 0), *_ENDS, ("repeat",), ("mark", 0, False)),
            *_of("o", ("add", 0), ("add", 0, 1), ("produce", 1), ("add offsets",), ("commit offsets",)),
            *_of("a", ("produce", 1), ("produce", 0, 1), ("repeat end",), ("end", True, -1), ("commit offsets",)),
        ],
    ),
}
"""The same for transactions of version 2."""


def _all_steps(alphabets, names):
    return sorted(
        {*(step_ for _, steps in alphabets.values() for step_ in steps), *_of(names, ("reinit",), ("repeat",))}
    )


EVERYTHING = _all_steps(ALPHABETS, "bc")
EVERYBODY = {"a": "X", "b": "X", "c": "Y"}
EVERYTHING_V2 = _all_steps(ALPHABETS_V2, "bco") + _of("bc", *_LATE)
EVERYBODY_V2 = {"a": _A, "b": _B, "c": _C, "o": "X"}


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


def random_sequences(count, length, seed, steps=EVERYTHING):
    """Sequences over all alphabets' steps, of all clients on two ids."""
    rng = random.Random(seed)
    return [tuple(rng.choices(steps, k=length)) for _ in range(count)]


def last_epochs(count, seed):
    """Sequences of two clients of version 2 that share an id, around the last epoch of its producer id."""
    steps = [
        *_of("a", ("produce", 0), ("produce", 0), *_ENDS, *_ENDS, ("reinit",), ("late", 0)),
        *_of("ab", ("init",), ("repeat end",)),
        *_of("b", *_ENDS),
    ]
    fenced = (("produce", "a", 0), ("init", "b"), ("end", "a", False), ("produce", "a", 0))
    tried = [
        (2, ("reinit", "a"), ("reinit", "a", -1), ("produce", "a", 0), ("end", "a", True)),
        (2, ("init", "b"), ("reinit", "a"), ("produce", "b", 0), ("reinit", "a"), ("end", "b", True)),
        (2, ("produce", "a", 0), ("init", "b"), ("init", "b"), ("init", "b"), ("produce", "b", 0)),
        (1, *fenced, ("end", "a", True), ("repeat end", "a"), ("init", "b"), ("produce", "b", 0)),
        *((3, *chosen) for chosen in random_sequences(count, 14, seed, steps)),
    ]
    return [(("init", "a"), ("near the last epoch", "a", left), ("init", "a"), *chosen) for left, *chosen in tried]
