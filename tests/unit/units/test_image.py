"""The image of the newest values."""

from dualwrite.units import KeyedImage, UnitRecord


def test_a_change_is_seen_after_it_is_published_and_not_before():
    image = KeyedImage({b"a": b"1", b"b": b"1"})
    image.apply(UnitRecord(b"a", None))
    image.apply(UnitRecord(b"c", b"2"))
    assert (image[b"a"], image.get(b"c"), len(image)) == (b"1", None, 2)
    image.publish()
    assert image.contents() == {b"b": b"1", b"c": b"2"}
    image.publish()
    assert image.contents() == {b"b": b"1", b"c": b"2"}


def test_a_reverted_change_is_gone():
    image = KeyedImage({b"a": b"1"})
    image.apply(UnitRecord(b"a", b"2"))
    image.revert()
    image.publish()
    assert image.contents() == {b"a": b"1"}


def test_the_last_change_of_a_key_counts_and_records_without_a_key_change_nothing():
    image = KeyedImage()
    for value in (b"1", None, b"3"):
        image.apply(UnitRecord(b"a", value))
    image.apply(UnitRecord(None, b"4"))
    image.publish()
    assert image.contents() == {b"a": b"3"}


def test_contents_are_a_copy():
    given = {b"a": b"1"}
    image = KeyedImage(given)
    image.contents()[b"b"] = given[b"c"] = b"2"
    assert image.contents() == {b"a": b"1"}
