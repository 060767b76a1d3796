"""What a broker lacks, by the versions of requests that it offers."""

import pytest

from dualwrite.kafka.facts import lacking
from dualwrite.kafka.messages import Offered

# The key of each request that a writer or recovery sends, and its newest version in Kafka 3.0.
KAFKA_3_0 = {1: 12, 3: 11, 10: 4, 22: 4, 23: 4, 24: 3, 26: 3, 61: 0, 65: 0}


def offered(newest):
    return Offered({key: (0, version) for key, version in newest.items()})


def test_kafka_3_0_lacks_nothing():
    assert lacking(offered(KAFKA_3_0)) == set()


@pytest.mark.parametrize("key", KAFKA_3_0)
def test_a_request_that_is_not_offered_is_lacking(key):
    assert len(lacking(offered({other: version for other, version in KAFKA_3_0.items() if other != key}))) == 1


def test_a_version_that_is_too_old_is_named_with_the_versions_that_are_needed():
    assert lacking(offered({**KAFKA_3_0, 3: 8, 10: 3})) == {"Metadata 11 to 13", "FindCoordinator 4 to 6"}
