"""The markers, byte by byte; `conformance/test_unit_records.py` holds the same bytes against Kafka's own classes."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dualwrite import ConfigurationError
from dualwrite.units import AbortTransaction, BeginTransaction, EndTransaction
from dualwrite.units.records import (
    HEADER,
    UnitEvent,
    UnitRecord,
    decoded,
    encoded,
    event_of,
    marker_record,
    part_of_unit,
    shortened,
)

texts = some.none() | some.text(max_size=85).filter(lambda text: len(text.encode(errors="replace")) <= 255).filter(
    lambda text: not any("\ud800" <= c <= "\udfff" for c in text)
)


@pytest.mark.parametrize(
    ("marker", "raw"),
    [
        (BeginTransaction(), "01 17 00 00"),
        (BeginTransaction(""), "01 17 00 01 00 01 01"),
        (BeginTransaction("größe"), "01 17 00 01 00 08 08 67 72 c3 b6 c3 9f 65"),
        (EndTransaction(), "01 18 00 00"),
        (AbortTransaction(), "01 19 00 00"),
        (AbortTransaction("x" * 200), "01 19 00 01 00 ca 01 c9 01" + "78" * 200),
    ],
)
def test_a_marker_is_what_kafka_writes(marker, raw):
    assert encoded(marker) == bytes.fromhex(raw)
    assert decoded(bytes.fromhex(raw)) == marker


@given(texts, some.sampled_from([BeginTransaction, AbortTransaction]))
def test_a_marker_is_read_as_it_was_written(text, kind):
    assert decoded(encoded(kind(text))) == kind(text)


@given(some.binary(max_size=40))
def test_what_is_no_marker_is_refused(raw):
    try:
        marker = decoded(raw)
    except ConfigurationError:
        return
    assert type(marker) in {BeginTransaction, EndTransaction, AbortTransaction}


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "01",
        "02 17 00 00",  # another frame
        "01 17 01 00",  # another version
        "01 1a 00 00",  # another record
        "01 17 00 00 00",  # too long
        "01 17 00 01 00 08 08 67",  # cut off
        "01 17 00 01 00 02 08 67",  # a length beyond the field
        "01 ff ff ff ff ff 0f 00 00",  # an endless number
        "01 17 00 01 00 02 02 ff",  # no UTF-8
    ],
)
def test_bytes_that_are_no_marker_are_refused_with_what_to_do(raw):
    with pytest.raises(ConfigurationError, match="not the marker of a unit.*let nothing but a UnitWriter"):
        decoded(bytes.fromhex(raw))


def test_fields_that_a_later_kafka_adds_are_passed_over():
    assert decoded(bytes.fromhex("01 18 00 01 07 02 aa bb")) == EndTransaction()
    assert decoded(bytes.fromhex("01 17 00 02 00 02 02 61 07 00")) == BeginTransaction("a")


@pytest.mark.parametrize("kind", [BeginTransaction, AbortTransaction])
def test_a_text_of_more_than_255_bytes_is_refused(kind):
    assert decoded(encoded(kind("ö" * 127))).__dict__.popitem()[1] == "ö" * 127
    with pytest.raises(ConfigurationError, match="256 bytes.*at most 255"):
        encoded(kind("ö" * 128))


def test_a_text_that_has_no_encoding_is_shortened_to_its_escapes_and_refused_as_a_name():
    assert shortened("bad \udcff") == "bad \\udcff"
    with pytest.raises(ConfigurationError, match="is no text"):
        encoded(BeginTransaction("bad \udcff"))


def test_a_text_is_shortened_between_characters():
    assert shortened("a" + "ö" * 200) == "a" + "ö" * 127
    assert shortened("short") == "short"


def test_markers_have_no_key_and_every_record_of_a_unit_says_that_it_is_one():
    assert marker_record(EndTransaction()) == UnitRecord(None, encoded(EndTransaction()), ((HEADER, b"end"),))
    assert event_of(marker_record(BeginTransaction("b")).headers) is UnitEvent.BEGIN
    assert event_of(marker_record(AbortTransaction("b")).headers) is UnitEvent.ABORT
    part = part_of_unit(b"k", b"v", [("mine", b"1")])
    assert part == UnitRecord(b"k", b"v", (("mine", b"1"), (HEADER, b"part")))
    assert event_of(part.headers) is UnitEvent.PART
    assert event_of([("mine", b"1")]) is UnitEvent.RECORD


@pytest.mark.parametrize("word", [b"record", b"", None, b"middle"])
def test_an_unknown_word_in_the_header_is_refused(word):
    with pytest.raises(ConfigurationError, match="read with a newer version"):
        event_of([(HEADER, word)])


def test_a_user_cannot_set_the_header():
    with pytest.raises(ConfigurationError, match="the library's own"):
        part_of_unit(b"k", b"v", [(HEADER, b"end")])
