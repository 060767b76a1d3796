"""What message a row of an outbox table makes, and which mappings and rows make none."""

import json

import pytest

from dualwrite.errors import ConfigurationError
from dualwrite.protocol.outbox_table import (
    BadRow,
    Mapping,
    OutboxTable,
    Placement,
    channel,
    fields_of,
    relay_id,
    schema_and_name,
    text_of,
)


def made(table, *rows):
    """The messages of rows, each of which holds the table's columns by name."""
    columns = [field.column for field in fields_of(table)]
    return list(Mapping(table).messages([[row.get(column) for column in columns] for row in rows]))


def plain(**changed):
    return OutboxTable(**{"topic": "t", "key_column": None, "id_column": None, **changed})


ROW = {"aggregatetype": "order", "aggregateid": "7", "payload": '{"a": 1}', "id": "uuid"}


def test_by_default_columns_mean_what_they_mean_to_debezium():
    [found] = made(OutboxTable(), ROW)
    assert (found.topic, [*found.keys], [*found.values]) == ("outbox.event.order", ["7"], ['{"a": 1}'])
    assert found.headers_of(0) == [("id", "uuid")]
    assert (found.partitions, found.timestamps, found.headers) == (None, None, None)


def test_rows_of_a_topic_keep_their_order_and_everything_that_they_have():
    table = OutboxTable(
        topic="x.${routedByValue}",
        partition_column="part",
        timestamp_column="ms",
        headers_column="more",
        placements=[Placement("type", "header", "kind")],
    )
    rows = [
        {
            **ROW,
            "aggregatetype": "ab"[number % 2],
            "payload": str(number),
            "id": number,
            "part": number,
            "ms": 10 * number,
            "more": json.dumps({"n": number}),
            "type": f"t{number}",
        }
        for number in range(6)
    ]
    first, second = made(table, *rows)
    for found, numbers in ((first, [0, 2, 4]), (second, [1, 3, 5])):
        assert found.topic == f"x.{'ab'[numbers[0]]}"
        assert list(found.values) == [str(number) for number in numbers]
        assert list(found.partitions) == numbers
        assert list(found.timestamps) == [10 * number for number in numbers]
        for row, number in enumerate(numbers):
            assert list(found.headers_of(row)) == [("id", number), ("kind", f"t{number}"), ("n", str(number).encode())]


def test_a_column_may_be_the_partition_by_its_place_or_by_its_setting_but_only_one():
    [found] = made(plain(placements=[Placement.parse("part:partition")]), {"payload": "", "part": 3})
    assert [*found.partitions] == [3]
    same = plain(partition_column="part", placements=[Placement.parse("part:partition")])
    assert [field.use for field in fields_of(same)].count("partition") == 1
    with pytest.raises(ConfigurationError, match="name one column"):
        plain(partition_column="a", placements=[Placement.parse("b:partition")])


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("type:header", Placement("type", "header", "type")),
        (" type:envelope:eventType ", Placement("type", "envelope", "eventType")),
        ("part:partition", Placement("part", "partition", "part")),
        ("a:header:b:c", Placement("a", "header", "b:c")),
    ],
)
def test_a_placement_is_a_column_a_place_and_perhaps_a_name(text, parsed):
    assert Placement.parse(text) == parsed


@pytest.mark.parametrize("text", ["", "type", "type:", ":header", "type:body", "type:Header"])
def test_what_says_no_place_is_no_placement(text):
    with pytest.raises(ConfigurationError, match="does not say where a column goes"):
        Placement.parse(text)


@pytest.mark.parametrize("value", [None, "", "  ", b""])
def test_an_empty_value_is_a_tombstone_only_on_request_and_null_always(value):
    assert list(made(plain(), {"payload": value})[0].values) == [value]
    assert list(made(plain(tombstone_on_empty=True), {"payload": value})[0].values) == [None]
    assert list(made(plain(tombstone_on_empty=True), {"payload": "x"})[0].values) == ["x"]


@pytest.mark.parametrize(
    ("payload", "text", "expanded"),
    [
        (None, None, None),
        ('{"a": 1}', '{"a": 1}', {"a": 1}),
        ("[1, 2]", "[1, 2]", [1, 2]),
        ("{no JSON", "{no JSON", "{no JSON"),
        ('"text"', '"text"', '"text"'),
        (b"\xff\x00", "ff00", "ff00"),
        ("\u00e4\n", "\u00e4\n", "\u00e4\n"),
    ],
)
def test_an_envelope_holds_the_payload_as_text_or_as_the_json_that_it_is(payload, text, expanded):
    for expand, expected in ((False, text), (True, expanded)):
        table = plain(placements=[Placement("n", "envelope", 'a "name"')], expand_json=expand)
        [value] = made(table, {"payload": payload, "n": 5})[0].values
        assert json.loads(value) == {"payload": expected, 'a "name"': 5}


@pytest.mark.parametrize(("given", "shown"), [(None, None), (1.5, 1.5), (True, True), ("x", "x"), (b"x", "x")])
def test_a_column_in_an_envelope_keeps_numbers_and_null(given, shown):
    [value] = made(plain(placements=[Placement("n", "envelope", "n")]), {"payload": "p", "n": given})[0].values
    assert json.loads(value)["n"] == shown


def test_an_empty_payload_with_an_envelope_is_a_tombstone_as_well():
    table = plain(placements=[Placement("n", "envelope", "n")], tombstone_on_empty=True)
    assert list(made(table, {"payload": None, "n": 1}, {"payload": " ", "n": 1})[0].values) == [None, None]


@pytest.mark.parametrize(
    ("given", "headers"),
    [
        (None, []),
        ("{}", []),
        (
            '{"a": "x", "b": null, "c": 1, "d": {"e": true}}',
            [("a", b"x"), ("b", None), ("c", b"1"), ("d", b'{"e": true}')],
        ),
        ('[["a", "1"], ["a", "2"]]', [("a", b"1"), ("a", b"2")]),
        ('[{"key": "a", "value": "x"}]', [("a", b"x")]),
        (b'{"a": "\xc3\xa4"}', [("a", "\u00e4".encode())]),
    ],
)
def test_headers_come_from_an_object_or_a_list_of_pairs(given, headers):
    assert list(made(plain(headers_column="more"), {"payload": "", "more": given})[0].headers_of(0)) == headers


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{", "does not hold JSON"),
        ("1", "neither an object nor a list of pairs"),
        ("[1]", "neither a name with a value nor a pair"),
        ('[["a"]]', "neither a name with a value nor a pair"),
        ('[[1, "a"]]', "neither a name with a value nor a pair"),
        ('[{"key": "a"}]', "neither a name with a value nor a pair"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"\\ud800": "a"}', "surrogate"),
    ],
)
def test_a_row_with_other_headers_makes_no_message_and_is_named(given, reason):
    good = {"payload": "secret", "more": None}
    with pytest.raises(BadRow, match=reason) as caught:
        made(plain(headers_column="more"), good, {**good, "more": given})
    assert caught.value.row == 1
    assert "secret" not in str(caught.value)


def test_a_row_without_a_topic_makes_no_message_unless_the_topic_does_not_depend_on_it():
    with pytest.raises(BadRow, match="aggregatetype, which names the topic, is null") as caught:
        made(OutboxTable(), ROW, ROW, {**ROW, "aggregatetype": None})
    assert caught.value.row == 2
    assert made(OutboxTable(topic="fixed"), {**ROW, "aggregatetype": None})[0].topic == "fixed"


def test_what_could_not_be_sent_is_kept_with_all_that_can_be_told_of_it():
    table = OutboxTable(partition_column="part", headers_column="more")
    columns = [field.column for field in fields_of(table)]
    mapping = Mapping(table)
    row = {**ROW, "part": 2, "more": '{"h": "v"}'}
    kept = mapping.aside([row[column] for column in columns], "relay", "too large")
    assert (kept.topic, kept.key, kept.value, kept.partition) == ("outbox.event.order", b"7", b'{"a": 1}', 2)
    assert (kept.headers, kept.reason) == ([("id", b"uuid"), ("h", b"v")], "too large")
    broken = mapping.aside([{**row, "more": "{"}[column] for column in columns], "relay", "no JSON")
    assert (broken.topic, broken.key, broken.value, broken.headers) == ("", b"7", b'{"a": 1}', [])
    nowhere = mapping.aside([{**row, "part": -1}[column] for column in columns], "relay", "no such partition")
    assert nowhere.partition is None


def test_settings_that_contradict_each_other_or_are_empty_are_refused():
    with pytest.raises(ConfigurationError, match="not both"):
        OutboxTable(order_by=["seq"], unordered=True)
    for what in ("name", "topic", "topic_column", "value_column"):
        with pytest.raises(ConfigurationError):
            OutboxTable(**{what: ""})


@pytest.mark.parametrize(
    ("name", "schema", "table"), [("outbox", None, "outbox"), ("shop.outbox", "shop", "outbox"), ("a.b.c", "a.b", "c")]
)
def test_a_table_may_have_a_schema(name, schema, table):
    assert schema_and_name(OutboxTable(name=name)) == (schema, table)
    assert relay_id(OutboxTable(name=name)) == f"relay-{name}"


def test_a_channel_has_letters_that_need_no_quotes_and_postgresqls_length():
    assert channel(OutboxTable(name="Shop.Outbox-Events")) == "dualwrite_shop_outbox_events"
    assert len(channel(OutboxTable(name="x" * 200))) == 63


@pytest.mark.parametrize(
    ("value", "text"), [("a", "a"), (1, "1"), (b"\xc3\xa4", "\u00e4"), (memoryview(b"a"), "a"), (b"\xff", "ff")]
)
def test_values_are_text_as_the_database_shows_them(value, text):
    assert text_of(value) == text
