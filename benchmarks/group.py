"""Group commit: ``writer.submit`` by many threads, against the unsafe way; and by one, against a plain block.

``PYTHONPATH=tests python -m benchmarks --only group``
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from sqlalchemy import Engine, create_engine, insert

from benchmarks.servers import Ground
from benchmarks.threads import LANES, Measured, shared_unsafe, slice_of_threads
from benchmarks.ways import METADATA, NATIVE, ROWS, UNSAFE, Write, ours
from dualwrite import DualWriter, Transaction
from dualwrite.ports.observer import Observer

GROUP = "group commit"
THREADS = (1, 64)


class Sizes(Observer):
    """Notes the number of units of each group."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def grouped(self, writer: str, units: int) -> None:
        del writer
        self.noted.append(units)


@contextmanager
def grouped(kafka: Mapping[str, str], engine: Engine, topic: str, sizes: Sizes) -> Iterator[Write]:
    """This library's group commit, with its own producer."""
    name = f"group-{topic}"
    with DualWriter(
        name, kafka=kafka, database=engine, max_lanes=LANES, producer_engine="native", telemetry=sizes
    ) as writer:

        def write(notes: Sequence[str]) -> None:
            def unit(tx: Transaction) -> None:
                for note in notes:
                    tx.produce(topic, value=note)
                tx.connection.execute(insert(ROWS).values(note=notes[0]))

            writer.submit(unit).result()

        yield write


def run(
    ground: Ground,
    *,
    threads: Sequence[int] = THREADS,
    rounds: int = 4,
    slice_s: float = 4.0,
    warm_up_s: float = 1.0,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure in slices, the ways in turn; by number of threads, way and figure. Times in milliseconds."""
    engine = create_engine(ground.url, pool_size=2 * LANES, max_overflow=0)
    unsafes = create_engine(ground.url, pool_size=LANES, max_overflow=0, pool_timeout=60)
    METADATA.create_all(engine)
    topic = ground.topic()
    sizes = Sizes()
    with ExitStack() as stack:
        ways: dict[str, Write] = {
            GROUP: stack.enter_context(grouped(ground.kafka, engine, topic, sizes)),
            NATIVE: stack.enter_context(ours(ground.kafka, engine, topic, NATIVE, lanes=LANES)),
            UNSAFE: stack.enter_context(shared_unsafe(ground.kafka, unsafes, topic)),
        }
        found = {count: {name: Measured() for name in ways} for count in threads}
        of_group: dict[int, list[int]] = {count: [] for count in threads}
        for write in ways.values():
            slice_of_threads(write, max(threads), warm_up_s, 0.0, Measured())  # makes all lanes
        for _ in range(rounds):
            for count, by_way in found.items():
                for name, write in ways.items():
                    sizes.noted.clear()
                    slice_of_threads(write, count, slice_s, warm_up_s, by_way[name])
                    of_group[count] += sizes.noted if name == GROUP else []
    engine.dispose()
    unsafes.dispose()
    figures = {str(count): {name: one.figures() for name, one in by_way.items()} for count, by_way in found.items()}
    for count, found_sizes in of_group.items():
        figures[str(count)][GROUP]["units of a group"] = statistics.median(found_sizes)
    return figures
