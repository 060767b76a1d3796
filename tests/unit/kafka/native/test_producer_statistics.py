"""The statistics of a native producer: what is counted, and when the callback is called."""

from __future__ import annotations

import json
import logging

import pytest

from dualwrite.kafka.native.produce_state import Batch, Delivered, Limits, ProduceCore
from dualwrite.kafka.native.producer import Statistics
from dualwrite.kafka.native.records import Codec, RecordsBuilder


def builder():
    return RecordsBuilder(Codec(), limit_bytes=1000)


@pytest.fixture
def core():
    return ProduceCore(Limits(), builder)


@pytest.fixture
def told():
    return []


def delivered(count):
    made = builder()
    for _ in range(count):
        made.append(b"value", None, (), 1)
    return Delivered(("orders", 0), Batch(made.build(), 0, 0.0), 7)


def test_the_callback_is_called_after_each_interval_with_what_was_acknowledged(core, told):
    statistics = Statistics("app", 2.0, told.append)
    statistics.note([], core, 10.0)
    statistics.note([delivered(2), delivered(3)], core, 10.1)
    core.append(("orders", 0), b"waits", b"k", (), 1, now=11.0)
    statistics.note([], core, 11.9)
    assert told == []
    statistics.note([], core, 12.0)
    statistics.note([], core, 13.9)
    [found] = map(json.loads, told)
    assert (found["name"], found["txmsgs"], found["batches"]) == ("app", 5, 2)
    assert (found["msg_cnt"], found["msg_size"], found["requests_in_flight"]) == (1, 6, 0)
    statistics.note([], core, 14.0)
    assert len(told) == 2


def test_an_exception_of_the_callback_is_logged_and_changes_nothing(core, caplog):
    def fails(_):
        raise RuntimeError("of the callback")

    statistics = Statistics("app", 1.0, fails)
    statistics.note([], core, 1.0)
    with caplog.at_level(logging.ERROR):
        statistics.note([], core, 3.0)
    assert "app: stats_cb raised" in caplog.text
