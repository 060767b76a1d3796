"""64 threads on 8 lanes, as docs/benchmarks.md measures them: none of them waits much longer than the others."""

import pytest

from benchmarks import threads
from benchmarks.servers import Ground
from benchmarks.ways import ENGINES

pytestmark = pytest.mark.parametrize("url", ["postgresql"], indirect=True)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_slowest_of_many_threads_on_few_lanes_wait_little_longer_than_most(
    dualwrite_kafka, dualwrite_postgres, kafka, url
):
    found = threads.run(Ground(dualwrite_kafka, dualwrite_postgres, kafka, url), threads=[64], rounds=1, slice_s=20)
    for way in ENGINES:
        figures = found["64"][way]
        assert figures["p99"] <= 3 * figures["p50"], (way, figures)
        # A thread that never gets a lane has nothing among these times.
        assert figures["fewest of a thread"] >= figures["most of a thread"] / 2, (way, figures)
