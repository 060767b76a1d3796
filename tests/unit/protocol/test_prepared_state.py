"""``PreparedTxnState``: text form and parser mirror each other, and nothing else is taken."""

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.prepared_state import (
    MAX_NATIVE_OFFSETS,
    MAX_TEXT_LENGTH,
    Engine,
    FirstOffset,
    FurtherPartitions,
    PreparedTxnState,
    parsed,
    stored_text,
    written,
)
from dualwrite.stores.sql.tables import digest

ARCHITECTURE = (Path(__file__).parents[3] / "docs/architecture.md").read_text(encoding="utf-8")

TOPICS = st.text("abcXYZ019._-", min_size=1, max_size=20)
TOPIC_IDS = st.none() | st.text("abcXYZ019_-", min_size=1, max_size=22)


@st.composite
def states(draw):
    ids = draw(st.dictionaries(TOPICS, TOPIC_IDS, max_size=4))
    firsts = tuple(
        FirstOffset(topic, partition, draw(st.integers(0, 2**63 - 1)), topic_id)
        for topic, topic_id in ids.items()
        for partition in draw(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
    )
    return PreparedTxnState(
        draw(st.integers(0, 2**63 - 1)),
        draw(st.integers(0, 2**15 - 1)),
        draw(st.none() | st.integers(0, 2**63 - 1)),
        firsts,
        draw(st.none() | st.integers(0, 2**63 - 1)),
    )


@given(states())
def test_every_state_survives_text_json_and_pickle(state):
    back = PreparedTxnState.from_string(json.loads(json.dumps(str(state))))
    assert back == state
    assert back.started_ms == state.started_ms
    assert pickle.loads(pickle.dumps(state)) == state


@given(st.text("0123456789:;=,@it.abc-_ +٣", max_size=40))
def test_whatever_parses_is_written_back_to_the_letter(text):
    try:
        state = PreparedTxnState.from_string(text)
    except ConfigurationError:
        return
    assert str(state) == text


def test_kip_939_form_is_read_and_written():
    assert PreparedTxnState.from_string("42:7") == PreparedTxnState(42, 7)
    assert str(PreparedTxnState(42, 7)) == "42:7"
    assert not PreparedTxnState.from_string("").has_transaction
    assert str(PreparedTxnState()) == ""


def test_the_full_form():
    state = PreparedTxnState(
        42,
        0,
        3,
        (
            FirstOffset("payments", 0, 4),
            FirstOffset("orders", 1, 33, "c2FtcGxl"),
            FirstOffset("orders", 0, 17, "c2FtcGxl"),
        ),
        1767225600000,
    )
    assert str(state) == "42:0;i=3;t=1767225600000;orders@c2FtcGxl:0=17,1=33;payments:0=4"


@pytest.mark.parametrize(
    "text",
    [
        "42", "42:", ":0", "-1:-1", "42:32768", "9223372036854775808:0", "042:0", "4_2:0", " 42:0", "42:0 ", "+42:0", "٤٢:0",
        "42:0;", "42:0;i=", "42:0;i=-1", "42:0;t=5;i=3", "42:0;orders", "42:0;orders:", "42:0;orders:0", "42:0;orders:0=",
        "42:0;orders:0=1,", "42:0;orders:0=1,0=2", "42:0;orders:1=1,0=2", "42:0;orders:0=1;orders:1=2", "42:0;z:0=1;a:0=1",
        "42:0;or ders:0=1", "42:0;orders@:0=1", "42:0;orders@x y:0=1", "42:0;orders:2147483648=1", "42:0:0", "x" * 100,
        "1" * (MAX_TEXT_LENGTH + 1),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_a_short_message(text):
    with pytest.raises(ConfigurationError, match="not a prepared transaction state") as caught:
        PreparedTxnState.from_string(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "arguments",
    [
        (-2, 0),
        (2**63, 0),
        (0, -1),
        (0, 2**15),
        (-1, 0),
        (-1, -1, 3),
        (1, 1, None, (FirstOffset("a", 0, 1), FirstOffset("a", 0, 2))),
    ],
)
def test_values_out_of_range_cannot_be_made(arguments):
    with pytest.raises(ConfigurationError):
        PreparedTxnState(*arguments)


def test_start_time_is_not_a_part_of_the_identity():
    assert PreparedTxnState(1, 1, 1, (), 5) == PreparedTxnState(1, 1, 1, (), None)
    assert PreparedTxnState(1, 1, 1, (FirstOffset("a", 0, 1),)) != PreparedTxnState(1, 1, 1, (FirstOffset("a", 0, 2),))


ID, OTHER_ID = "c2FtcGxlc2FtcGxlc2FtcA", "b3RoZXJvdGhlcm90aGVyYQ"
FULL_NATIVE = f"42:7;n;i=3;orders@{ID}:0=17,1=33,2-9999;payments@{OTHER_ID}:~VVVVVQ"


@st.composite
def native_states(draw):
    topics = draw(st.dictionaries(TOPICS, st.text("abcXYZ019_-", min_size=1, max_size=22), min_size=1, max_size=4))
    numbers = st.sets(st.integers(0, 200) | st.integers(0, 2**31 - 1), min_size=1, max_size=60)
    offsets = {
        (topic, number): draw(st.none() | st.integers(0, 2**63 - 1)) for topic in topics for number in draw(numbers)
    }
    ids = (
        draw(st.integers(0, 2**63 - 1)),
        draw(st.integers(0, 2**15 - 1)),
        draw(st.none() | st.integers(0, 2**63 - 1)),
    )
    return PreparedTxnState.native(*ids, offsets, topics), offsets, topics


def all_of(state):
    return state.engine, state.incarnation, state.first_offsets, state.further, state.started_ms


@given(native_states())
def test_every_native_state_names_all_its_partitions_and_survives_text_and_pickle(drawn):
    state, offsets, topics = drawn
    for back in (PreparedTxnState.from_string(str(state)), pickle.loads(pickle.dumps(state))):
        assert back == state
        assert all_of(back) == all_of(state)
    assert state.partitions == offsets.keys()
    assert state.topic_ids == topics
    known = {key for key, offset in offsets.items() if offset is not None}
    named = {(first.topic, first.partition): first.offset for first in state.first_offsets}
    assert len(named) == min(len(known), MAX_NATIVE_OFFSETS)
    assert all(offsets[key] == offset for key, offset in named.items())
    witnessed = {topic for topic, _ in known}
    assert {topic for topic, _ in named} == witnessed or len(named) == MAX_NATIVE_OFFSETS


@given(
    TOPICS | st.text("ab:; ", max_size=3), st.integers(-1, 2**31), st.integers(-1, 2**63), st.text("aZ_:", max_size=23)
)
def test_what_is_stored_of_one_partition_is_read_back_or_refused(topic, number, offset, topic_id):
    """Its text is written without a look at what it holds; whatever would not be read back must not be stored."""
    state = PreparedTxnState.native(42, 7, 3, {(topic, number): offset}, {topic: topic_id})
    assert str(state) == state._rendered()
    try:
        read = PreparedTxnState.from_string(str(state))
    except ConfigurationError:
        with pytest.raises(ConfigurationError):
            stored_text(state)
    else:
        assert all_of(read) == all_of(state)
        assert stored_text(state) == str(state)


@given(st.text("0123456789~-,=n@:;itVA", max_size=30))
def test_whatever_native_text_parses_is_written_back_to_the_letter(text):
    for whole in (f"42:7;n;{text}", f"42:7;n;a@x:{text}", f"42:7;n;a@x:0=1,{text}"):
        try:
            state = PreparedTxnState.from_string(whole)
        except ConfigurationError:
            continue
        assert str(state) == whole
        assert state.is_native


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=400))
def test_partition_numbers_survive_their_text_which_is_the_shorter_form(numbers):
    text = written(sorted(numbers))
    assert parsed(text, len(numbers)) == sorted(numbers)
    ranges = ",".join(str(number) for number in sorted(numbers))
    assert len(text) <= min(len(ranges), 1 + (max(numbers) // 8 + 1) * 4 // 3 + 1)
    if len(numbers) > 1:
        with pytest.raises(ValueError, match="too many"):
            parsed(text, len(numbers) - 1)


def test_the_full_native_form():
    state = PreparedTxnState.native(
        42,
        7,
        3,
        {
            **{("orders", number): None for number in range(2, 10_000)},
            ("orders", 0): 17,
            ("orders", 1): 33,
            **{("payments", number): None for number in range(0, 32, 2)},
        },
        {"orders": ID, "payments": OTHER_ID},
    )
    assert str(state) == FULL_NATIVE
    assert PreparedTxnState.from_string(FULL_NATIVE) == state
    assert str(PreparedTxnState(42, 7, engine=Engine.NATIVE)) == "42:7;n"


@pytest.mark.parametrize(
    "text",
    [
        "42:7;n;", "42:7;n;n", "42:7;i=3;n", "n", "42:7;N", "42:7;n;a:0=1", "42:7;n;a:1", "42:7;a@x:1", "42:7;a@x:0=1,2",
        "42:7;n;a@x:", "42:7;n;a@x:2-", "42:7;n;a@x:2-2", "42:7;n;a@x:3-2", "42:7;n;a@x:1,2", "42:7;n;a@x:2,1",
        "42:7;n;a@x:1-3,3", "42:7;n;a@x:1,0=5", "42:7;n;a@x:0=5,0", "42:7;n;a@x:0=5,0-3", "42:7;n;a@x:01", "42:7;n;a@x:1-03",
        "42:7;n;a@x:2147483648", "42:7;n;a@x:0-2147483647", "42:7;n;a@x:0-100000", "42:7;n;a@x:0-50000;b@x:0-60000",
        "42:7;n;a@x:~", "42:7;n;a@x:~A", "42:7;n;a@x:~VVVVVVVV=", "42:7;n;a@x:~VVVVVVVVAA", "42:7;n;a@x:~AQ",
        "42:7;n;a@x:0,~VVVVVVVV", "42:7;n;a@x:~VVVVVVVV,99", "42:7;n;a@x:1;a@y:2", "42:7;n;a@x:0=1;a@x:2", "42:7;n;b@x:1;a@x:1",
        "42:7;n;a@x:" + ",".join(f"{number}=0" for number in range(9)), "42:7;n;a@x:0=1,٤", "42:7;n;a@x:-1", "42:7;n;a@x:0--1",
    ],
)  # fmt: skip
def test_any_other_native_text_is_refused(text):
    with pytest.raises(ConfigurationError, match="not a prepared transaction state"):
        PreparedTxnState.from_string(text)


def test_native_states_with_the_same_producer_id_and_epoch_are_equal_whatever_else_they_name():
    state = PreparedTxnState.native(42, 7, 3, {("a", 0): 17, ("a", 1): 4}, {"a": ID})
    other = PreparedTxnState.native(42, 7, None, {("b", 5): None}, {"b": OTHER_ID})
    assert state == other
    assert len({state, other}) == 1
    assert digest(state) == digest(other) == digest(replace(state, started_ms=5))
    for different in (replace(state, epoch=8), replace(state, producer_id=43), PreparedTxnState(42, 7, 3)):
        assert state != different
        assert digest(state) != digest(different)
    assert state != "42:7;n"


@pytest.mark.parametrize(
    "offsets",
    [
        {("a", 0): 1, ("b", 0): 1},  # the id of b is not known
        {("a", -1): None},
        {("a", 2**31): None},
        {("a", number): None for number in range(100_001)},
    ],
)
def test_a_native_state_out_of_range_cannot_be_made(offsets):
    with pytest.raises(ConfigurationError):
        PreparedTxnState.native(42, 7, 3, offsets, {"a": ID})


def test_only_a_native_state_names_partitions_without_an_offset():
    with pytest.raises(ConfigurationError):
        PreparedTxnState(42, 7, 3, further=(FurtherPartitions("a", ID, (1,)),))
    with pytest.raises(ConfigurationError):
        PreparedTxnState(42, 7, engine=Engine.NATIVE, first_offsets=(FirstOffset("a", 0, 1),))
    with pytest.raises(ConfigurationError):
        PreparedTxnState(engine=Engine.NATIVE)


# The table in docs/architecture.md has these lengths.
SIZES = {
    "without a gap": (range, {1: 63, 100: 159, 10_000: 161}),
    "every second one": (lambda n: range(0, 2 * n, 2), {1: 63, 100: 193, 10_000: 3493}),
    "one in ten, at random": (lambda n: random.Random(1).sample(range(10 * n), n), {1: 63, 100: 329, 10_000: 16_830}),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_native_state_stays_small(name):
    numbers_of, expected = SIZES[name]
    for count, length in expected.items():
        offsets = {("orders", number): 1_000_000_000 for number in numbers_of(count)}
        text = str(PreparedTxnState.native(4_000_000, 12_345, 77, offsets, {"orders": ID}))
        assert len(text) == length
        assert PreparedTxnState.from_string(text).partitions == offsets.keys()
    assert f"| {name} | " + " | ".join(f"{length:,}" for length in expected.values()) + " |" in ARCHITECTURE
