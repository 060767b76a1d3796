"""Which way a block's messages go: a table of every setting, mode and lane, and the bounds of what may wait."""

from itertools import product

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.outbox import Way, asks_kafka_first, full, setting_of_block, way_of
from dualwrite.protocol.values import OutboxMode, WriterLimits

DIRECT, LATER = OutboxMode


def ways(setting, **known):
    """The ways for each mode, for a lane that can send and for one that cannot."""
    return [way_of(setting, mode, can_send=can, **known) for mode, can in product((DIRECT, LATER), (True, False))]


def test_a_block_that_must_not_wait_goes_direct_or_nowhere():
    assert ways("never", shared=False) == [Way.DIRECT, Way.DIRECT, Way.REFUSE, Way.REFUSE]


def test_a_block_that_finds_later_looks_again_under_a_share_of_the_lock():
    assert ways("fallback", shared=False) == [Way.DIRECT, Way.TURN, Way.SHARE, Way.SHARE]
    assert ways("fallback", shared=True) == [Way.DIRECT, Way.TURN, Way.WAIT, Way.WAIT]


def test_a_block_that_always_waits_turns_the_mode_of_a_writer_that_may_turn_it_back():
    assert ways("always", shared=False) == [Way.TURN, Way.TURN, Way.SHARE, Way.SHARE]
    assert ways("always", shared=True) == [Way.TURN, Way.TURN, Way.WAIT, Way.WAIT]


def test_a_writer_that_always_waits_never_turns_back_so_its_blocks_hold_no_share():
    assert ways("always", shared=False, always=True) == [Way.TURN, Way.TURN, Way.WAIT, Way.WAIT]


def test_no_setting_lets_a_message_overtake_those_that_wait():
    for setting, can, shared, always in product(("never", "fallback", "always"), *[(True, False)] * 3):
        assert way_of(setting, LATER, can_send=can, shared=shared, always=always) is not Way.DIRECT


@pytest.mark.parametrize(
    ("setting", "silent", "later", "asks"),
    [
        ("never", True, True, True),
        ("fallback", False, False, True),
        ("fallback", True, False, False),
        ("fallback", False, True, False),
        ("always", False, False, False),
    ],
)
def test_a_block_waits_for_kafka_only_if_its_messages_may_go_there(setting, silent, later, asks):
    assert asks_kafka_first(setting, silent=silent, later=later) is asks


def test_a_block_has_its_writers_setting_unless_it_has_its_own():
    assert setting_of_block("fallback", None) == "fallback"
    assert setting_of_block("fallback", "always") == "always"
    assert setting_of_block("fallback", "never") == "never"
    assert setting_of_block("never", "never") == "never"


def test_a_block_of_a_writer_that_always_waits_cannot_fall_back_from_anything():
    assert setting_of_block("always", "fallback") == "always"


@pytest.mark.parametrize(("writer", "block"), [("never", "fallback"), ("never", "always"), ("fallback", "sometimes")])
def test_a_setting_that_cannot_work_is_refused(writer, block):
    with pytest.raises(ConfigurationError, match="outbox"):
        setting_of_block(writer, block)


@pytest.mark.parametrize(
    ("waiting", "named"),
    [
        ({"rows": 10}, "outbox_rows=10"),
        ({"size": 1000}, "outbox_bytes=1000"),
        ({"oldest_s": 60.0}, "outbox_age_s=60"),
    ],
)
def test_no_more_may_wait_at_a_bound_which_the_error_names(waiting, named):
    limits = WriterLimits(outbox_rows=10, outbox_bytes=1000, outbox_age_s=60.0)
    assert full(limits, rows=9, size=999, oldest_s=59.0) is None
    assert full(limits, rows=0, size=0, oldest_s=None) is None
    assert named in full(limits, **{"rows": 9, "size": 999, "oldest_s": 59.0, **waiting})
