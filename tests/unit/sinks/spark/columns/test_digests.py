"""Which rows a partition has, in whatever order and in whatever batches."""

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from dualwrite.sinks.spark.columns.digests import Fingerprint, Fingerprinted, hashed_form, may_mix, other_rows

HASHES = np.random.default_rng(1).integers(-(2**63), 2**63, 1000)


def batch(hashes):
    return pa.RecordBatch.from_arrays([pa.array(range(len(hashes))), pa.array(hashes, pa.int64())], ["s0", "digest"])


def fingerprint(*batches):
    return Fingerprinted(batches, 1).take_all()


def test_the_order_and_the_size_of_batches_do_not_matter():
    whole = fingerprint(batch(HASHES))
    assert whole == fingerprint(batch(HASHES[500:]), batch(HASHES[:0]), batch(HASHES[:500][::-1]))
    assert whole.rows == 1000
    assert -(2**63) <= whole.digest < 2**63


def test_every_row_matters_and_how_often_it_comes():
    whole = fingerprint(batch(HASHES))
    assert whole.differs_from(fingerprint(batch(HASHES[1:])))
    assert whole.differs_from(fingerprint(batch([*HASHES[1:], HASHES[1]])))
    assert whole.differs_from(fingerprint())
    assert not fingerprint().differs_from(fingerprint(batch([])))


def test_what_is_passed_on_is_what_came():
    given = [batch(HASHES[:3]), batch(HASHES[3:])]
    taken = Fingerprinted(given, 1)
    assert list(taken) == given
    assert taken.fingerprint() == fingerprint(*given)


def test_rows_without_hashes_are_not_known_to_differ():
    unknown = Fingerprinted([batch(HASHES)], 2).take_all()
    assert unknown == Fingerprint(1000, None)
    assert not unknown.differs_from(fingerprint())
    assert not fingerprint().differs_from(unknown)


def test_the_error_tells_the_number_of_rows():
    assert "with 5 rows, and has 3 rows now" in str(other_rows("partition 0", Fingerprint(3, 1), Fingerprint(5, 2)))
    assert "with 5 rows, and has other rows now" in str(other_rows("partition 0", Fingerprint(5, 1), Fingerprint(5, 2)))


@pytest.mark.parametrize(
    ("data_type", "is_hashed"),
    [
        (spark.LongType(), True),
        (spark.ArrayType(spark.StringType()), True),
        (spark.MapType(spark.StringType(), spark.LongType()), True),
        (spark.VariantType(), True),
        (spark.MapType(spark.StringType(), spark.VariantType()), False),
        (spark.ArrayType(spark.MapType(spark.StringType(), spark.LongType())), False),
        (spark.StructType().add("a", spark.LongType()).add("b", spark.VariantType()), False),
    ],
)
def test_only_what_has_one_form_for_equal_values_is_hashed(data_type, is_hashed):
    assert (hashed_form(data_type) is not None) is is_hashed


def test_a_warning_is_for_batches_that_two_runs_could_write():
    assert 'format("dualwrite")' in may_mix("x is not compared", 4, 3)
    for partition_count, written in ((0, 0), (1, 0), (4, 4)):
        assert may_mix("x is not compared", partition_count, written) is None
