"""The simulated broker and a real one, side by side: sequences of steps run on both, and must look the same."""

from __future__ import annotations

import secrets
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from simulator import environment
from simulator import requests as sim
from simulator.broker import handle
from simulator.partition import committed_values, last_stable_offset
from simulator.requests import ErrorCode
from simulator.state import partition, transaction

from dualwrite.clock import Deadline
from harness.broker_steps import ENVIRONMENT, GROUP, LONG_MS, PARTITIONS, SET, begin, request_of, step
from harness.raw_broker import NEWEST, Names, RawBroker

SETTLED_S = 20
BROUGHT_ABOUT_S = 60
WAIT_S = 0.005
REFUSALS = (
    {ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_ABORTABLE},
    {ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_ENOUGH_REPLICAS},
)
"""Errors that one refusal has, in older and newer versions of requests."""


def codes(answers):
    """The error codes of a sequence's answers; of a request for several partitions that of the first."""
    return [
        getattr(answer, "error_code", None) or getattr(answer, "error_codes", (ErrorCode.NONE,))[0]
        for answer in answers
    ]


def committed(broker, number=0):
    """Values in a partition of the simulated broker, as readers of committed messages see them."""
    return committed_values(partition(broker, ("t", number)))


def in_time(play):
    """Play again if there was a difference: a hasty broker goes by its clock, and the machine may have been slow."""
    for _ in range(2):
        with suppress(Difference):
            return play()
    return play()


class Difference(AssertionError):
    """The simulator and the real broker do not agree, after these steps."""

    def __init__(self, sequence, what):
        steps = "\n".join(f"  {step_}" for step_ in sequence)
        super().__init__(f"after\n{steps}\n{what}")
        self.sequence = sequence


class Lane(NamedTuple):
    """Two partitions of the real broker for one sequence at a time."""

    topic: str
    topic_id: bytes
    numbers: tuple[int, ...]


class Both:
    """Plays sequences on both brokers, and compares every answer, and after every step all that can be seen.

    A prepared transaction's markers are waited for after each step, unless the simulator says that they never come.

    Args:
        kafka: The real one.
        versions: Of the requests.
        lanes: How many sequences run at a time. One, where a step restarts the broker.
        settings: Of the simulated broker, as those of the real one.
    """

    def __init__(self, kafka, *, versions=NEWEST, lanes=48, settings=None):
        self._kafka = kafka
        self._raw = RawBroker(kafka.client_config(), versions)
        self._lanes = lanes
        self._settings = settings
        self._free = deque()
        self._topics = []
        self._looked_at = set()  # beginnings of sequences: what follows each has been looked at
        self._only_waiting = 0  # sequences that will only look again
        self.steps = 0
        self.looks = 0
        self._raw.send([(Names(secrets.token_hex(8), "", b"", ()), sim.InitProducerId("warm"))])
        self._learn_epoch()

    def close(self):
        self._raw.close()
        for topic in self._topics:
            self._kafka.delete_topic(topic)

    def play_one(self, clients, *sequence):
        """Play one sequence; its answers (None for what is no request), and the simulated broker at the end."""
        self.play(clients, [sequence])
        answers = []
        play = begin(clients, settings=self._settings)
        for step_ in sequence:
            play, answer = step(play, step_)
            answers.append(answer)
        return answers, play.broker

    def play(self, clients, sequences):
        """Play all.

        Raises:
            Difference: At the first that looks different.
        """
        waiting = deque(sequences)
        running = []
        try:
            while waiting or running:
                while waiting and (self._free or not running):
                    lane = self._free.popleft() if self._free else self._new_lanes()
                    run = self._run(clients, list(waiting.popleft()), lane)
                    running.append((run, lane, next(run)))
                if self._only_waiting == len(running):
                    time.sleep(WAIT_S)
                self._only_waiting = 0
                answers = iter(self._raw.send([pair for _, _, pairs in running for pair in pairs]))
                still = []
                for run, lane, pairs in running:
                    try:
                        still.append((run, lane, run.send([next(answers) for _ in pairs])))
                    except StopIteration as done:
                        if done.value:
                            self._free.append(lane)
                running = still
        except BaseException:
            self._free.clear()  # what runs in them is left as it is
            raise

    def play_and_shrink(self, clients, sequences):
        """Play all, as `play`; report a difference by a sequence without any step that is not needed for it."""
        try:
            self.play(clients, sequences)
        except Difference as different:
            found = different
            index = 0
            while index < len(found.sequence):
                self._looked_at.clear()
                try:
                    self.play(clients, [found.sequence[:index] + found.sequence[index + 1 :]])
                    index += 1
                except Difference as shorter:
                    found = shorter
            raise found from different

    def _new_lanes(self):
        topic = self._kafka.create_topic(f"both-{secrets.token_hex(6)}", self._lanes * PARTITIONS)
        self._topics.append(topic)
        topic_id = self._raw.metadata(topic).topic_id
        self._free += [
            Lane(topic, topic_id, tuple(range(first, first + PARTITIONS)))
            for first in range(0, self._lanes * PARTITIONS, PARTITIONS)
        ]
        return self._free.popleft()

    def _learn_epoch(self):
        # Stands in every marker: the leader epoch of the coordinator's own partitions.
        epochs = {found.leader_epoch for found in self._raw.metadata("__transaction_state").partitions}
        [self._coordinator_epoch] = epochs

    def _run(self, clients, sequence, lane):
        """One sequence on both. Yields what to ask the real broker; returns whether its partitions can be used again."""
        names = Names(f"s-{secrets.token_hex(8)}", *lane)
        ends = yield [(names, sim.ListOffsets(("t", number))) for number in range(PARTITIONS)]
        bases = [answer.offset for answer in ends]
        play = begin(clients, bases=bases, coordinator_epoch=self._coordinator_epoch, settings=self._settings)
        for index, step_ in enumerate(sequence):
            so_far = tuple(sequence[: index + 1])
            request = request_of(play, step_)
            if step_[0] not in ENVIRONMENT and request is None:
                continue
            self.steps += 1
            before = play
            play, expected = step(play, step_)
            if request is None:
                yield from self._bring_about(before, play, names, step_)
            else:
                [answer] = yield [(names, request)]
                if isinstance(expected, (sim.InitProducerIdResponse, sim.EndTxnResponse)):
                    answer = names.learned(expected, answer)
                _compare(so_far, request, expected, answer)
            yield from self._settle(play, names)
            if so_far not in self._looked_at:
                self._looked_at.add(so_far)
                asked = _observations(play, bases)
                seen = yield [(names, look) for look in asked]
                self.looks += len(asked)
                for look, real in zip(asked, seen, strict=True):
                    _compare(so_far, look, handle(play.broker, look)[1], real)
        return (yield from self._clean_up(play, names, clients))

    def _bring_about(self, before, play, names, step_):
        """Let the real broker do what needs no request. It does some of it by itself, when its time has come."""
        verb, _, *arguments = step_
        if verb == "restart":
            self._kafka.restart()
            self._learn_epoch()
        elif verb == "create topic":
            self._kafka.create_topic(names.place((arguments[0], 0))[0])
        elif verb == "delete topic":
            self._kafka.delete_topic(names.place((arguments[0], 0))[0])
        elif verb == "delete records":
            place = ("t", arguments[0])
            self._raw.delete_records(names, place, partition(play.broker, place).log_start)
        elif verb == "near the last epoch":
            for known in play.broker.transactions:
                epoch = -1
                while epoch < known.producer_epoch:
                    [answer] = yield [(names, sim.InitProducerId(known.transactional_id, known.timeout_ms))]
                    epoch = answer.producer_epoch
        else:
            looks = [sim.DescribeTransactions(known.transactional_id) for known in before.broker.transactions]
            looks += [sim.DescribeProducers(("t", number)) for number in range(PARTITIONS)]
            expected = [_comparable(handle(play.broker, look)[1]) for look in looks]
            seen = []
            deadline = Deadline(BROUGHT_ABOUT_S)
            while seen != expected and not deadline.expired:
                answers = yield [(names, look) for look in looks]
                seen = [_comparable(answer) for answer in answers]
                self._only_waiting += seen != expected

    def _settle(self, play, names):
        """Wait until the real broker has written the markers that the simulator has written; not for ever, if it never does."""
        deadline = Deadline(SETTLED_S)
        expected = {
            sim.DescribeTransactions(known.transactional_id): (known.state, known.unmarked)
            for known in play.broker.transactions
        }
        while expected and not deadline.expired:
            seen = yield [(names, look) for look in expected]
            for look, view in zip(list(expected), seen, strict=True):
                if (view.transaction_state, view.partitions) == expected[look]:
                    del expected[look]
                    known = transaction(play.broker, look.transactional_id)
                    names.shown(look.transactional_id, known.producer_id)
            self._only_waiting += bool(expected)

    def _clean_up(self, play, names, clients):
        for kafka_id in sorted({client.kafka_id for _, client in begin(clients).clients}):
            known = transaction(play.broker, kafka_id)
            if known is not None and known.state == sim.ONGOING:
                request = sim.InitProducerId(kafka_id, LONG_MS)
                yield [(names, request)]
                play = play._replace(broker=environment.write_markers(handle(play.broker, request)[0]))
                yield from self._settle(play, names)
        found = [partition(play.broker, ("t", number)) for number in range(PARTITIONS)]
        return all(last_stable_offset(stable) == stable.log_end for stable in found)


def _observations(play, bases):
    """The queries whose answers are compared."""
    ids = sorted({client.kafka_id for _, client in play.clients})
    known = frozenset(found.producer_id for found in play.broker.transactions)
    asked = [sim.DescribeTransactions(kafka_id) for kafka_id in ids]
    if known:
        asked.append(sim.ListTransactions(producer_id_filters=known))
    for number in range(PARTITIONS):
        place = ("t", number)
        end = partition(play.broker, place).log_end
        asked.append(sim.DescribeProducers(place))
        asked += [sim.ListOffsets(place, level) for level in (sim.READ_UNCOMMITTED, sim.READ_COMMITTED)]
        asked += [sim.Fetch(place, bases[number], level) for level in (sim.READ_UNCOMMITTED, sim.READ_COMMITTED)]
        asked.append(sim.Fetch(place, (bases[number] + end) // 2, sim.READ_COMMITTED))
    if any(kept.partitions for kept in play.broker.transactions) or _has_offsets(play):
        asked += [sim.OffsetFetch(GROUP, ("t", 0), require_stable=stable) for stable in (False, True)]
    return asked


def _has_offsets(play):
    return any(found.log_end and found.topic_partition[0] != "t" for found in play.broker.partitions)


def _comparable(answer):
    """The answer without what cannot be equal: times, where a log that is used again begins, and more than was asked for.

    A broker lists aborted transactions beyond the batches that it returns, as far as its sparse index leads it.
    """
    if isinstance(answer, sim.DescribeTransactionsResponse):
        return answer._replace(transaction_start_time_ms=min(answer.transaction_start_time_ms, SET))
    if isinstance(answer, sim.FetchResponse):
        aborted = answer.aborted_transactions
        if aborted:
            end = answer.batches[-1].next_offset if answer.batches else 0
            aborted = tuple(sorted(entry for entry in aborted if entry.first_offset < end))
        return answer._replace(log_start_offset=0, aborted_transactions=aborted)
    return answer


def _same_refusal(request, expected, real):
    """Whether the broker refuses with the error of the other version.

    A partition's leader asks a coordinator for several requests at a time, and gives all of them the errors of the first
    one's version.
    """
    if not isinstance(request, (sim.Produce, sim.TxnOffsetCommit)):
        return False
    codes = {expected.error_code, real.error_code}
    return any(codes <= words for words in REFUSALS)


def _compare(sequence, request, expected, real):
    if _comparable(expected) != _comparable(real) and not _same_refusal(request, expected, real):
        raise Difference(sequence, f"{request}\nsimulated {expected}\nreal      {real}")
