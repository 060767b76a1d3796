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


@pytest.mark.parametrize(("name", "level"), [("brotli", -1), ("", -1), ("LZ4", -1), ("gzip", -2), ("zstd", 13)])
def test_codecs_and_levels_that_librdkafka_refuses_are_refused(name, level):
    with pytest.raises(ConfigurationError, match=r"compression\."):
        Codec(name, level)
