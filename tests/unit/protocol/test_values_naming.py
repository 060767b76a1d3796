"""The names in the database and in Kafka: each is read back as it was made, and none is taken for another one's."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dualwrite.protocol.values import (
    is_drawn,
    is_of_writer,
    kafka_id,
    lane_id,
    lane_number,
    may_own,
    outbox_id,
    owner_prefix,
    parsed,
    pool_of_sink,
    stream_name,
    writer_of,
)

NAMES = st.text('ab.#"\\ 1\n\N{EURO SIGN}', min_size=1, max_size=8)
WRITERS = st.text("ab.1 \n", min_size=1, max_size=8)
NAMESPACES = st.text("ab#1 ", min_size=1, max_size=8)
NUMBERS = st.integers(0, 2**63 - 1)


def test_the_first_lane_has_the_name_itself_and_the_others_a_number():
    assert [lane_id("orders", number) for number in range(3)] == ["orders", "orders#1", "orders#2"]


@given(WRITERS, st.integers(0, 9), NUMBERS)
def test_the_ids_and_kafka_ids_of_a_writer_belong_to_it_and_to_no_other(name, number, incarnation):
    lane = lane_id(name, number)
    for known in (lane, kafka_id(lane, "0123456789ab", incarnation)):
        assert is_of_writer(name, known)
        assert not is_of_writer(name + "x", known)


@given(WRITERS, NUMBERS)
def test_every_lane_belongs_to_its_writer(name, number):
    assert writer_of(lane_id(name, number)) == name
    assert lane_number(name, lane_id(name, number)) == number
    assert lane_number(name + "x", lane_id(name, number)) is None


@given(WRITERS)
def test_the_outbox_is_a_lane_of_its_writer_without_a_number(name):
    assert writer_of(outbox_id(name)) == name
    assert lane_number(name, outbox_id(name)) is None


@pytest.mark.parametrize("name", ["orders#", "orders#0", "orders#01", "orders#1#1", "orders#x", "1"])
def test_what_is_no_lane_of_the_writer_has_no_number(name):
    assert lane_number("orders", name) is None


@given(NAMES, NAMESPACES, NUMBERS)
def test_a_kafka_id_is_read_back_whatever_the_name_contains(name, namespace, incarnation):
    assert parsed(kafka_id(name, namespace, incarnation)) == (name, namespace, incarnation)


@pytest.mark.parametrize(
    "name",
    ["", "orders", "orders.n", "orders.n.", "orders.n.x", "orders.n.-1", "orders.n.01", "orders.n.1 ", "orders.n.1\n",
     ".n.1", "orders..1", "orders.n.٣"],
)  # fmt: skip
def test_other_programs_ids_are_not_read(name):
    assert parsed(name) is None


@pytest.mark.parametrize(
    ("namespace", "drawn"),
    [
        ("0123456789ab", True),
        ("0123456789a", False),
        ("0123456789abc", False),
        ("0123456789AB", False),
        ("0123456789ag", False),
        ("0123456789ab\n", False),
        ("", False),
    ],
)
def test_only_a_namespace_of_the_librarys_form_counts_as_drawn(namespace, drawn):
    assert is_drawn(namespace) is drawn


def test_a_sinks_pool_has_another_name_than_a_writer_of_the_sinks_name():
    assert pool_of_sink("flights") != "flights"
    assert pool_of_sink("flights") != pool_of_sink("trains")


@given(NAMES, NAMES, st.integers(0, 12), st.integers(0, 12), st.text("ab 1", max_size=4))
def test_an_owners_name_has_the_prefix_of_its_own_batch_and_partition_and_of_no_other(one, other, at, elsewhere, rest):
    owner = owner_prefix(one, at) + rest
    assert owner.startswith(owner_prefix(one))
    assert owner.startswith(owner_prefix(other)) is (one == other)
    assert owner.startswith(owner_prefix(one, elsewhere)) is (at == elsewhere)


@given(NAMES, NAMES)
def test_a_task_may_own_its_own_batch_and_no_other(batch_id, other):
    assume(other != batch_id)
    owner = owner_prefix(batch_id, 3) + "attempt 1"
    assert may_own(owner, batch_id)
    assert not may_own(owner, other)


@given(NAMES)
def test_a_task_of_a_stream_may_own_any_batch_as_its_name_does_not_show_which(batch_id):
    assert may_own(owner_prefix(stream_name("0a1b"), 3) + "attempt 1", batch_id)
    assert stream_name("0a1b") != stream_name("0a1c")
