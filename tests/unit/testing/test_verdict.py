"""Each thing that can be wrong with two sides is found, and named for what it is."""

import pytest

from dualwrite.testing import History, Kind, Verdict
from dualwrite.testing.checker import Place, Word, compare, compare_readings


def history(**words):
    """A history of operations a, b, c of one stream, each with the word given."""
    found = History()
    for operation in "abc":
        found.add(Word.BEGUN, operation, "s")
    for operation, word in words.items():
        found.add(Word(word), operation, "")
    return found


def messages(*partitions):
    return [
        Place("t", partition, offset, operation)
        for partition, operations in enumerate(partitions)
        for offset, operation in enumerate(operations)
    ]


def kinds(story, rows, sent, count=2):
    return [(finding.kind, finding.subject) for finding in compare(story, rows, sent, messages_per_operation=count)]


def test_both_sides_equal_and_in_order_is_clean():
    told = history(a="acknowledged", b="aborted")
    assert compare(told, "ac", messages("ac", "ac"), messages_per_operation=2) == []


@pytest.mark.parametrize(
    ("told", "rows", "sent", "found"),
    [
        ({"a": "acknowledged"}, "", messages("", ""), (Kind.LOST, "a")),
        ({"a": "acknowledged"}, "a", messages("", ""), (Kind.LOST, "a")),
        ({"a": "acknowledged"}, "", messages("a", "a"), (Kind.LOST, "a")),
        ({"a": "lost"}, "a", messages("", ""), (Kind.LOST, "a")),
        ({}, "a", messages("", ""), (Kind.TORN, "a")),
        ({}, "", messages("a", "a"), (Kind.TORN, "a")),
        ({}, "a", messages("a", ""), (Kind.TORN, "a")),
        ({}, "a", messages("aa", "a"), (Kind.TWICE, "a")),
        ({}, "aa", messages("a", "a"), (Kind.TWICE, "a")),
        ({"a": "aborted"}, "a", messages("a", "a"), (Kind.UNDONE, "a")),
        ({}, "x", messages("x", "x"), (Kind.FOREIGN, "x")),
        ({}, "ab", messages("ba", "ab"), (Kind.REORDERED, "a")),
    ],
)
def test_what_is_wrong_is_found(told, rows, sent, found):
    assert kinds(history(**told), rows, sent) == [found]


@pytest.mark.parametrize(
    ("writers", "acknowledged_first", "found"),
    [
        (("w", "w"), True, [(Kind.REORDERED, "a")]),
        (("w", "w"), False, []),
        (("v", "w"), True, []),
        (("", ""), True, []),
    ],
)
def test_what_a_writer_acknowledged_before_another_began_comes_first(writers, acknowledged_first, found):
    told = History()
    events = [(Word.BEGUN, "a"), (Word.ACKNOWLEDGED, "a"), (Word.BEGUN, "b"), (Word.ACKNOWLEDGED, "b")]
    if not acknowledged_first:
        events[1:3] = events[2:0:-1]
    for word, operation in events:
        writer = writers["ab".index(operation)] if word is Word.BEGUN else ""
        told.add(word, operation, f"stream of {operation}", writer)
    assert kinds(told, "ab", messages("ab", "ba")) == found


def test_order_of_different_streams_does_not_matter():
    told = History()
    for operation in "ab":
        told.add(Word.BEGUN, operation, f"stream of {operation}")
    assert kinds(told, "ab", messages("ba", "ab")) == []


def test_consumers_that_saw_different_messages_disagree():
    one, other = {"t": messages("ab", "")}, {"t": messages("ac", "")}
    (finding,) = compare_readings(one, other, "both")
    assert (finding.kind, finding.subject) == (Kind.DISAGREEING, "t[0]")
    assert compare_readings(one, one, "both") == []
    assert compare_readings(one, {}, "both")


def test_a_message_that_a_consumer_saw_twice_is_a_disagreement():
    (finding,) = compare_readings({"t": [*messages("a"), *messages("a")]}, {"t": messages("a")}, "both")
    assert finding.kind is Kind.DISAGREEING


def test_a_verdict_with_findings_fails():
    Verdict().raise_findings()
    with pytest.raises(AssertionError, match="lost: a"):
        Verdict(compare(history(a="acknowledged"), "", [])).raise_findings()
