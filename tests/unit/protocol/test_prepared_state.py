"""``PreparedTxnState``: text form and parser mirror each other, and nothing else is taken."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.prepared_state import MAX_TEXT_LENGTH, FirstOffset, PreparedTxnState

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
