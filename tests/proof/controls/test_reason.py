"""Controls of the checker itself: ways to write to both sides that must be found losing, doubling or tearing."""

import pytest

from controls.dying import Death
from controls.reason import suffer
from controls.running import Servers

HARM = {
    # Killed in the middle of the third operation, while the row names the second one's producer.
    "kip939": (Death(0, "first message sent", 2), "torn"),
    "kafka-inside": (Death(0, "Kafka committed", 1), "twice"),
    "database-inside": (Death(0, "database committed", 1), "lost"),
    "commit-then-send": (Death(0, "database committed", 1), "lost"),
    "send-then-commit": (Death(0, "all messages sent", 1), "twice"),
}


@pytest.fixture
def given(dualwrite_kafka, dualwrite_postgres):
    return Servers(dualwrite_kafka, dualwrite_postgres)


IN_EVERY_RUN = {"kip939", "commit-then-send", "send-then-commit"}
"""One for each harm."""


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in IN_EVERY_RUN else pytest.mark.thorough) for way in HARM]
)
def test_a_way_without_a_protocol_is_found_out(way, given, tmp_path):
    death, word = HARM[way]
    counts = suffer(way, [death], given, tmp_path)
    assert counts[death.step][word] == 1


@pytest.mark.parametrize("step", [pytest.param("write.produced", marks=pytest.mark.thorough), "write.decided"])
def test_the_library_killed_at_such_a_moment_loses_nothing(step, given, tmp_path):
    counts = suffer("dualwrite", [Death(0, step, 2)], given, tmp_path)
    assert counts[step] == {"runs": 1, "lost": 0, "twice": 0, "torn": 0}
