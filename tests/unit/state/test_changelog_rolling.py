"""Whether a store may be rolled forward from its changelog."""

import pytest

from dualwrite import ConfigurationError
from dualwrite.errors import ChangelogDiffers, StoreTooOld
from dualwrite.state.changelog import Log, first_to_read, require_complete
from dualwrite.state.entries import Position

HOUR = 3_600_000
DAY = 24 * HOUR


def log(
    start=0, end=100, policy="compact", retention_ms=7 * DAY, retention_bytes=-1, delete_retention_ms=DAY, recent=None
):
    policies, first_recent = frozenset(policy.split(",")), end if recent is None else recent
    return Log("log[0]", start, end, policies, retention_ms, retention_bytes, delete_retention_ms, first_recent)


def store(offset, age_ms=0):
    return Position(offset=offset, at_ms=NOW - age_ms)


NOW = 2_000_000_000_000
NEW = Position()


@pytest.mark.parametrize(
    ("committed", "described", "first"),
    [
        (NEW, log(), 0),
        (NEW, log(end=0), 0),
        (store(40), log(), 40),
        (store(40), log(start=40), 40),
        (store(100), log(), 100),
        (store(40, DAY), log(), 40),
        # Nothing but the commit's own marker follows, whatever the age.
        (store(99, 9 * DAY), log(), 99),
        (store(100, 9 * DAY), log(), 100),
        # It was quiet, not away: whatever follows the marker was written within the time for which tombstones stay.
        (store(40, 9 * DAY), log(recent=41), 40),
        (store(40, 9 * DAY), log(recent=40), 40),
        # Without compaction a tombstone stays.
        (store(40, 9 * DAY), log(policy="delete", retention_ms=-1), 40),
    ],
)
def test_the_records_after_the_stores_offset_are_read(committed, described, first):
    assert first_to_read(committed, described, NOW) == first


@pytest.mark.parametrize(
    ("committed", "described", "error", "words"),
    [
        (store(101), log(), ChangelogDiffers, "ends at 100, before the store's offset 101"),
        (store(40), log(start=41), ChangelogDiffers, "restore a newer copy"),
        (NEW, log(start=1), ChangelogDiffers, "nothing can build this store"),
        (store(98, DAY + 1), log(), StoreTooOld, "24.0 hours old"),
        (store(40, DAY + 1), log(recent=42), StoreTooOld, "may have lost some"),
        (store(98, 2 * HOUR), log(delete_retention_ms=HOUR), StoreTooOld, "keeps deletions for 1.0"),
        (store(98, 2 * DAY), log(policy="compact,delete"), StoreTooOld, "move the store's directory away"),
    ],
)
def test_a_store_that_would_become_wrong_is_refused(committed, described, error, words):
    with pytest.raises(error, match=words):
        first_to_read(committed, described, NOW)


@pytest.mark.parametrize(
    ("policy", "retention_ms", "retention_bytes", "complete"),
    [
        ("compact", DAY, 5, True),
        ("delete", -1, -1, True),
        ("compact,delete", -1, -1, True),
        ("delete", DAY, -1, False),
        ("delete", -1, 1 << 30, False),
        ("compact,delete", DAY, -1, False),
    ],
)
def test_a_changelog_that_deletes_records_is_refused(policy, retention_ms, retention_bytes, complete):
    described = log(policy=policy, retention_ms=retention_ms, retention_bytes=retention_bytes)
    if complete:
        require_complete(described)
    else:
        with pytest.raises(ConfigurationError, match="loses records"):
            require_complete(described)
