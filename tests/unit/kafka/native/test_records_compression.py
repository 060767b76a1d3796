"""Codecs and their levels, in librdkafka's terms."""

import secrets

import lz4.frame
import pytest
from harness.records import UNCOMPRESS

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.native.records import Codec

TEXT = b"".join(b'{"id":%d,"name":"customer %d"}' % (number, number * number % 97) for number in range(20_000))
NAMES = ["none", "gzip", "snappy", "lz4", "zstd"]
HIGHEST = {"none": 0, "gzip": 9, "snappy": 0, "lz4": 12, "zstd": 12}
DEFAULT = {"none": 0, "gzip": 6, "snappy": 0, "lz4": 0, "zstd": 3}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [-1, 1, 12])
def test_what_is_compressed_is_uncompressed_by_the_number_in_the_attributes(name, level):
    number, made = Codec(name, level).compress(TEXT)
    assert (number, NAMES[number]) == (Codec(name).number, name)
    assert UNCOMPRESS[number](made) == TEXT
    assert (number, made) == Codec(name, level).compress(bytearray(TEXT)), "a retry must repeat the bytes"


@pytest.mark.parametrize("name", NAMES)
def test_minus_one_is_the_default_and_levels_above_the_highest_are_the_highest(name):
    assert Codec(name, -1).compress(TEXT) == Codec(name, DEFAULT[name]).compress(TEXT)
    assert Codec(name, 12).compress(TEXT) == Codec(name, HIGHEST[name]).compress(TEXT)


@pytest.mark.parametrize("name", ["gzip", "lz4", "zstd"])
def test_the_level_reaches_the_codec(name):
    assert Codec(name, 9).compress(TEXT) != Codec(name, 1).compress(TEXT)


def test_lz4_frames_have_independent_blocks_of_64_kib():
    info = lz4.frame.get_frame_info(Codec("lz4").compress(TEXT)[1])
    assert (info["block_linked"], info["block_size"], info["content_size"]) == (False, 64 * 1024, 0)


@pytest.mark.parametrize("name", NAMES)
def test_records_that_would_grow_stay_as_they_are(name):
    noise = secrets.token_bytes(1000)
    assert Codec(name).compress(noise) == (0, noise)


def test_gzip_at_level_0_compresses_nothing_and_is_left_out():
    assert Codec("gzip", 0).compress(TEXT) == (0, TEXT)


DIGITS = "".join(str(number * number * 7_919) for number in range(90_000)).encode()
"""lz4 saves a third of it."""


@pytest.mark.parametrize("size", [10_000, 65_535, 65_536, 500_000])
def test_what_does_not_become_half_as_long_stays_as_it_is_where_that_is_asked_for(size):
    codec = Codec("lz4", must_halve=True)
    assert codec.compress(TEXT[:size]) == Codec("lz4").compress(TEXT[:size])
    assert len(Codec("lz4").compress(DIGITS[:size])[1]) < 0.9 * size
    for content in (DIGITS[:size], bytearray(DIGITS[:size]), memoryview(DIGITS)[:size]):
        assert codec.compress(content) == (0, DIGITS[:size])


def test_a_part_tells_that_a_large_batch_is_not_worth_it(monkeypatch):
    taken = []
    compress = lz4.frame.compress
    monkeypatch.setattr(lz4.frame, "compress", lambda raw, **how: taken.append(len(raw)) or compress(raw, **how))
    Codec("lz4", must_halve=True).compress(DIGITS[:900_000])
    assert taken == [16_384]


def test_what_is_worth_it_only_in_its_middle_stays_as_it_is():
    content = DIGITS[:400_000] + TEXT[:100_000] + DIGITS[400_000:800_000]
    assert Codec("lz4", must_halve=True).compress(content) == (0, content)


def test_what_a_broker_takes_only_compressed_is_compressed_in_any_case():
    content = (DIGITS * 2)[:1_000_001]
    codec = Codec("lz4", must_halve=True)
    assert codec.compress(content) == Codec("lz4").compress(content)
    assert codec.compress(content[:-1]) == (0, content[:-1])


@pytest.mark.parametrize(("name", "level"), [("brotli", -1), ("", -1), ("LZ4", -1), ("gzip", -2), ("zstd", 13)])
def test_codecs_and_levels_that_librdkafka_refuses_are_refused(name, level):
    with pytest.raises(ConfigurationError, match=r"compression\."):
        Codec(name, level)
