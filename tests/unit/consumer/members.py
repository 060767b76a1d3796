"""The working part of a consumer, on the simulated Kafka and SQLite, with messages given by hand."""

from functools import partialmethod

from harness.served import TOPIC

from dualwrite import Transaction
from dualwrite.consumer import consumer
from dualwrite.consumer.consumer import CurrentWriter, Working
from dualwrite.consumer.partitions import PartitionLost, Partitions

from .messages import read

LETTERS = TOPIC
"""The simulated Kafka has this topic alone, and chooses no partitions: dead letters go to the second one."""


class InMemory:
    """Offsets that move in no transaction; can be told to refuse."""

    def __init__(self):
        self.to = {}
        self.refusals = []

    def move(self, _tx, unit, _to):
        if unit.is_lost:
            raise PartitionLost
        if self.refusals:
            raise self.refusals.pop(0)

    def moved(self, _unit, to):
        self.to |= to


class Member:
    def __init__(self, shop, monkeypatch, handler, **options):
        monkeypatch.setattr(consumer, "pause_s", lambda _: 0.0)
        monkeypatch.setattr(Transaction, "produce", partialmethod(Transaction.produce, partition=1))
        self.partitions = Partitions(100, 0.0, 1)
        self.partitions.add([("input", 0)])
        self.offsets = InMemory()
        self.shop = shop
        self.writer = CurrentWriter(self._open)
        self.opened = 0
        given = {"attempts": 2, "dead_letter_topic": None, "transient": (), **options}
        self.working = Working("group", handler, self.writer, self.offsets, self.partitions, **given)

    def _open(self):
        self.opened += 1
        return self.shop.writer("group/0")

    def perform(self, count):
        return self.perform_all(read(count))

    def perform_all(self, messages):
        self.partitions.put(messages)
        self.unit = self.partitions.take()
        return self.working.perform(self.unit)
