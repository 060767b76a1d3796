"""Stores with timestamps and windows against dictionaries."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite import ConfigurationError

pytest.importorskip("rocksdict", reason="the extra 'state' is not installed")

from dualwrite.state import KeyValueStore, Timestamped, TimestampedKeyValueStore, WindowStore

KEYS = st.sampled_from([b"", b"\0", b"\0\0", b"a"])
VALUES = st.none() | st.binary(max_size=2)
TIMES = st.integers(0, 12)
BOUNDS = st.none() | KEYS


@contextmanager
def opened() -> Iterator[KeyValueStore]:
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as directory, KeyValueStore(directory) as store:
        yield store


@settings(max_examples=20)
@given(
    writes=st.lists(st.tuples(KEYS, VALUES, st.integers(-(2**63), 2**63 - 1))),
    lower=BOUNDS,
    upper=BOUNDS,
    reverse=st.booleans(),
)
def test_timestamps_come_back_with_their_values(writes, lower, upper, reverse):
    expected = {}
    with opened() as under:
        store = TimestampedKeyValueStore(under)
        for number, (key, value, at_ms) in enumerate(writes):
            store.put(key, value, at_ms)
            expected.pop(key, None)
            if value is not None:
                expected[key] = Timestamped(value, at_ms)
            if number == len(writes) // 2:
                under.commit(number)
            assert store.get(key) == expected.get(key)
        inside = [k for k in expected if (lower is None or lower <= k) and (upper is None or k < upper)]
        found = list(store.range(lower, upper, reverse=reverse))
        assert found == [(key, expected[key]) for key in sorted(inside, reverse=reverse)]


@settings(max_examples=25)
@given(
    writes=st.lists(st.tuples(KEYS, VALUES, TIMES)), retention_ms=st.integers(5, 8),
    key=KEYS, begin=TIMES, end=TIMES, reverse=st.booleans(), now_ms=TIMES,
)  # fmt: skip
def test_windows_within_the_retention_are_read_and_no_others(writes, retention_ms, key, begin, end, reverse, now_ms):
    expected, newest = {}, 0
    with opened() as under:
        store = WindowStore(under, window_ms=5, retention_ms=retention_ms)
        for number, (written, value, start_ms) in enumerate(writes):
            late = start_ms <= newest - retention_ms
            assert store.put(written, value, start_ms) is not late
            if not late:
                newest = max(newest, start_ms)
                expected.pop((written, start_ms), None)
                if value is not None:
                    expected[written, start_ms] = value
            if number == len(writes) // 2:
                under.commit(number)

        def kept():
            return {at: value for at, value in expected.items() if at[1] > newest - retention_ms}

        def agree():
            assert {(k, start): value for k, start, value in store.all()} == kept()
            of_key = {start: value for (k, start), value in kept().items() if k == key}
            starts = sorted((start for start in of_key if begin <= start < end), reverse=reverse)
            assert list(store.fetch(key, begin, end, reverse=reverse)) == [(start, of_key[start]) for start in starts]
            assert store.get(key, begin) == of_key.get(begin)

        agree()
        newest = max(newest, now_ms)
        assert store.expire(now_ms) == len(expected) - len(kept())
        agree()
        assert len(list(under.range())) == len(kept())


@pytest.mark.parametrize(("window_ms", "retention_ms"), [(0, 5), (6, 5), (-1, 5)])
def test_windows_that_cannot_work_are_refused(window_ms, retention_ms):
    with opened() as under, pytest.raises(ConfigurationError, match="window_ms must be positive"):
        WindowStore(under, window_ms=window_ms, retention_ms=retention_ms)


def test_a_window_before_1970_is_refused():
    with opened() as under, pytest.raises(ValueError, match="before 1970"):
        WindowStore(under, window_ms=1, retention_ms=1).put(b"a", b"1", -1)


def test_windows_of_keys_that_begin_alike_stay_apart_and_in_order():
    starts = [0, 1, 255, 256, 70_000]
    with opened() as under:
        store = WindowStore(under, window_ms=1, retention_ms=1 << 40)
        for start_ms in reversed(starts):
            for key in (b"", b"\0", b"\0\0"):
                store.put(key, key + b"!", start_ms)
        for key in (b"", b"\0", b"\0\0"):
            assert list(store.fetch(key, 0, 1 << 40)) == [(start, key + b"!") for start in starts]
