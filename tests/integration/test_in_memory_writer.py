"""The writer in memory shows a user what the real one shows, on a real broker and database."""

from harness.user_view import CLIENTS, View, rows_of
from sqlalchemy import text

from dualwrite import DualWriter, WriterLimits
from dualwrite.testing import InMemoryWriter
from dualwrite.testing.checker import read_committed


def seen_by_a_user(writer, engine, topic):
    seen = {}
    for name, way in CLIENTS.items():
        seen[name] = []
        way(View(writer, engine, topic, seen[name]))
        seen[name].append(rows_of(engine))
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM orders"))
    return seen


def test_a_user_sees_the_same_of_both_writers(kafka, engine, dualwrite_topic):
    with DualWriter("orders", kafka=kafka, database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        real = seen_by_a_user(writer, engine, dualwrite_topic)
    with InMemoryWriter("orders", database=engine, limits=WriterLimits(max_lanes=1)) as writer:
        in_memory = seen_by_a_user(writer, engine, dualwrite_topic)
    for name in CLIENTS:
        assert in_memory[name] == real[name], name
    assert [(shown.partition, shown.key, shown.value, shown.headers) for shown in writer.messages] == [
        (shown.partition, shown.key, shown.value, shown.headers) for shown in read_committed(kafka, dualwrite_topic)
    ]
