"""The cost of one steady dual write in Python: the functions that it calls, and its processor time beside that of other ways.

Calls are counted in all threads, and a busy machine does not change them: a change that adds fifty calls shows at once.
Processor time is that of the whole process, with the threads of the writer and of librdkafka, and that of the servers.
``PYTHONPATH=tests/proof python -m benchmarks --only calls --only processor`` (half a minute)
"""

from __future__ import annotations

import cProfile
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
from sqlalchemy import create_engine

import dualwrite
from benchmarks.processors import BROKER, POSTGRESQL, servers_s
from benchmarks.servers import Ground, p50
from benchmarks.ways import (
    ENGINES,
    METADATA,
    NATIVE,
    OUTBOX,
    OVERLAPPED,
    SEQUENTIAL,
    SPAWN,
    UNSAFE,
    ours,
    outbox,
    unsafe,
    without_a_protocol,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from dualwrite.protocol.outbox import Outbox

FoundT = TypeVar("FoundT")
RUNS: Final = 3
OWN, STANDARD = "dualwrite", "the standard library"
_OWN: Final = str(Path(dualwrite.__file__).parent)
_SITE: Final = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_STANDARD: Final = (sysconfig.get_path("stdlib"), "<")
"""Where the standard library is; the second is the beginning of what it makes of text, such as named tuples."""
LEAST_CHANGE: Final = 0.5
"""A function that is called less than this more or less often has not changed: the background varies."""


@dataclass(frozen=True)
class Calls:
    """The calls of one write, means of many. Those of the code that writes are left out.

    Attributes:
        own: Of this library's functions.
        python: Of all functions written in Python. Each time that a generator is resumed counts, too.
        background: Those among them that are not the caller's: they are made in other threads.
        own_background: Of ``own``, those in other threads.
        built_in: Of functions written in C.
        packages: ``python`` by package.
        functions: ``python`` by function, such as ``dualwrite/writing/writer.py:DualWriter.transaction``.
    """

    own: float
    python: float
    background: float
    own_background: float
    built_in: float
    packages: Mapping[str, float]
    functions: Mapping[str, float]


class Counting:
    """Counts the calls of the thread that enters it, and of those that start in its block.

    Python calls a profile function at each call of one thread, and can set it for threads that are yet to start. So a writer
    must be opened in the block.
    """

    def __init__(self) -> None:
        self._counted: dict[int, Counter[CodeType | None]] = {}
        self._is_on = False
        self._caller = 0

    def __enter__(self) -> Self:
        self._caller = threading.get_ident()
        threading.setprofile(self._begin)
        self._begin(sys._getframe(), "call", None)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] # as its documentation says

    def _begin(self, _frame: FrameType, _event: str, _argument: Any) -> None:
        """Give this thread a counter of its own: if several added to one, counts would be lost."""
        counts: Counter[CodeType | None] = Counter()
        self._counted[threading.get_ident()] = counts

        def count(frame: FrameType, event: str, _: Any) -> None:
            if self._is_on:
                if event == "call":
                    counts[frame.f_code] += 1
                elif event == "c_call":
                    counts[None] += 1

        sys.setprofile(count)

    def of(self, write: Callable[[], object], times: int) -> Calls:
        """Count what that function calls, means of this many times, with the background work that runs meanwhile."""
        for counts in self._counted.values():
            counts.clear()
        self._is_on = True
        try:
            for _ in range(times):
                write()
        finally:
            self._is_on = False
        packages, functions = Counter[str](), Counter[str]()
        background = own_background = built_in = 0
        for thread, counts in list(self._counted.items()):
            if thread != self._caller and any(_is_of_a_test(code) for code in counts if code is not None):
                continue  # such as a proxy in front of a server: it runs in this process, but is no part of a write
            built_in += counts[None]
            for code, calls in counts.items():
                if code is not None and (package := package_of(code.co_filename)):
                    packages[package] += calls
                    functions[named(code)] += calls
                    if thread != self._caller:
                        background += calls
                        own_background += calls if package == OWN else 0
        return Calls(
            packages[OWN] / times,
            sum(packages.values()) / times,
            background / times,
            own_background / times,
            built_in / times,
            {name: calls / times for name, calls in packages.most_common()},
            {name: calls / times for name, calls in functions.most_common()},
        )


def _is_of_a_test(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{_OWN}/testing/")


def package_of(file: str) -> str | None:
    """Which package this file is in; None: it is the code that writes."""
    if file.startswith(_OWN):
        return OWN
    if site := next((folder for folder in _SITE if file.startswith(folder)), None):
        return Path(file).relative_to(site).parts[0].removesuffix(".py")
    return STANDARD if file.startswith(_STANDARD) else None


def named(code: CodeType) -> str:
    """Its file, from its package on, and its name: with its class, from Python 3.11 on."""
    return f"{_short(code.co_filename)}:{getattr(code, 'co_qualname', code.co_name)}"


def _short(file: str) -> str:
    """The path from its package on."""
    for folder in (*_SITE, str(Path(_OWN).parent), _STANDARD[0]):
        if file.startswith(folder):
            return Path(file).relative_to(folder).as_posix()
    return file


def in_new_process(measure: Callable[..., FoundT], *arguments: object) -> FoundT:
    """Measure where nothing is loaded that a dual write does not need: OpenTelemetry, for one, would be asked each time."""
    with ProcessPoolExecutor(1, mp_context=SPAWN) as pool:
        return pool.submit(measure, *arguments).result()


def run(ground: Ground, *, operations: int = 100, warm_up: int = 100) -> dict[str, Any]:
    """Count the calls of a steady dual write, and of one whose messages always wait, and profile the first, in new processes."""
    given = (ground.kafka, ground.url, ground.topic(1), operations, warm_up)
    calls, waiting = in_new_process(count, *given), in_new_process(count, *given, RUNS, "always")
    own = {name: round(times, 1) for name, times in calls.functions.items() if name.startswith(f"{OWN}/")}
    functions = {name: times for name, times in own.items() if times >= LEAST_CHANGE}
    return {
        **asdict(calls),
        "functions": functions,
        "always": {name: asdict(waiting)[name] for name in ("own", "python", "background", "own_background")},
        "microseconds": in_new_process(profile, *given),
    }


def count(
    kafka: Mapping[str, str],
    url: str,
    topic: str,
    operations: int = 100,
    warm_up: int = 100,
    runs: int = RUNS,
    outbox: Outbox = "never",
) -> Calls:
    """Count the calls of a steady dual write with the default engine and psycopg, one message and one row.

    With ``outbox="always"`` those of the sender are in the background. It sends what several writes have put.

    Returns:
        Of the runs, the one in which the caller's thread made the fewest: a wait that the machine cuts into two parts, and a
        question that is asked again, take more calls. The shorter the runs, the surer is it that one is spared.
    """
    engine = create_engine(url)
    METADATA.create_all(engine)
    with Counting() as counting, ours(kafka, engine, topic, NATIVE, outbox=outbox) as write:
        for _ in range(warm_up):
            write(["x"])
        found = [counting.of(lambda: write(["x"]), operations) for _ in range(runs)]
    engine.dispose()
    return min(found, key=lambda calls: calls.python - calls.background)


def profile(kafka: Mapping[str, str], url: str, topic: str, operations: int, warm_up: int) -> dict[str, float]:
    """The caller's own processor time in each function, in microseconds of a write: the 25 that take most."""
    engine = create_engine(url)
    METADATA.create_all(engine)
    profiled = cProfile.Profile(time.thread_time)
    with ours(kafka, engine, topic, NATIVE) as write:
        for _ in range(warm_up):
            write(["x"])
        with profiled:
            for _ in range(operations):
                write(["x"])
    engine.dispose()
    used = Counter[str]()
    for entry in profiled.getstats():
        code: CodeType | str = entry.code
        name = code if isinstance(code, str) else named(code)
        used[name] += entry.inlinetime / operations * 1e6
    return dict(used.most_common(25))


def processor(
    ground: Ground, *, rounds: int = 9, operations: int = 100, warm_up: int = 500
) -> dict[str, dict[str, float]]:
    """Measure the processor time of a call in each way, by one caller, in slices in turn, in a new process."""
    return in_new_process(processor_ms, ground.kafka, ground.url, ground.topic(1), rounds, operations, warm_up)


def processor_ms(
    kafka: Mapping[str, str], url: str, topic: str, rounds: int, operations: int, warm_up: int
) -> dict[str, dict[str, float]]:
    """The same in this process, which the one that has started the servers has started.

    Returns:
        Milliseconds of a call, by way: of the ``process``, and of the ``caller``'s thread alone, the medians of all slices; of the
        servers, whose clocks tick in hundredths of a second, the means.
    """
    benchmark = psutil.Process().parent()
    assert benchmark is not None
    engine = create_engine(url)
    METADATA.create_all(engine)
    with ExitStack() as stack:
        made = {
            **{name: ours(kafka, engine, topic, name) for name in ENGINES},
            SEQUENTIAL: without_a_protocol(kafka, engine, topic),
            OVERLAPPED: without_a_protocol(kafka, engine, topic, overlapped=True),
            UNSAFE: unsafe(kafka, engine, topic),
            OUTBOX: outbox(kafka, engine, topic),
        }
        ways = {name: stack.enter_context(way) for name, way in made.items()}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        servers = {name: Counter[str]() for name in ways}
        for number in range(rounds + 1):
            for name, write in ways.items():
                servers_before = servers_s(benchmark)
                before = time.process_time(), time.thread_time()
                calls = operations if number else warm_up
                for _ in range(calls):
                    write(["x"])
                after = time.process_time(), time.thread_time()
                if number:
                    samples[name].append((1000 * (after[0] - before[0]) / calls, 1000 * (after[1] - before[1]) / calls))
                    for server, seconds in servers_s(benchmark).items():
                        servers[name][server] += 1000 * (seconds - servers_before[server]) / (rounds * calls)
    engine.dispose()
    return {
        name: {
            "process": p50([process for process, _ in found]),
            "caller": p50([caller for _, caller in found]),
            **servers[name],
        }
        for name, found in samples.items()
    }


def together(way: Mapping[str, float]) -> float:
    """Milliseconds of a call of all processes."""
    return way["process"] + way[BROKER] + way[POSTGRESQL]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences from the figures before, largest first: they show what a change of the code has cost or saved."""
    lines = [
        f"{name}: {before[name]:.0f} calls before, {now[name]:.0f} now" for name in ("own", "python", "background")
    ]
    differences = {
        name: now["functions"].get(name, 0.0) - before["functions"].get(name, 0.0)
        for name in before["functions"].keys() | now["functions"].keys()
    }
    largest = sorted(differences, key=lambda name: -abs(differences[name]))[:25]
    return [
        *lines,
        *(f"{differences[name]:+7.1f}  {name}" for name in largest if abs(differences[name]) >= LEAST_CHANGE),
    ]


def section(figures: Mapping[str, Any], *, table: Callable[[Sequence[str], Any], list[str]]) -> list[str]:
    """The section of ``docs/benchmarks.md`` on the calls."""
    functions, always = list(figures["functions"].items()), figures["always"]
    return [
        "## The calls of a dual write",
        "",
        "One steady dual write with the default engine and psycopg, one message and one row: calls of functions written in Python, "
        "in all threads, means of many writes. These do not depend on the speed of the machine.",
        "",
        f"- This library's own functions: **{figures['own']:.0f}** (aim: at most 250).",
        f"- All functions written in Python: **{figures['python']:.0f}** (aim: at most 1,200), of which "
        f"{figures['background']:.0f} in threads other than the caller's, most of them to know how the transaction has ended.",
        f"- Functions written in C, called by them: {figures['built_in']:.0f}.",
        f"- With `outbox=\"always\"`: {always['own'] - always['own_background']:.0f} of this library's own in the caller's thread, and "
        f"{always['own_background']:.0f} in the sender's; of all, {always['python'] - always['background']:.0f} and {always['background']:.0f}.",
        "",
        *table(("package", "calls"), ([name, f"{calls:.0f}"] for name, calls in figures["packages"].items())),
        f"This library's functions with the most calls, of {len(functions)}:",
        "",
        *table(("function", "calls"), ([f"`{name}`", f"{calls:.1f}"] for name, calls in functions[:25])),
        "And where the caller's processor time goes: microseconds of a write in each function itself, from a profile, which makes "
        "small functions look dearer than they are.",
        "",
        *table(
            ("function", "microseconds"),
            ([f"`{name}`", f"{used:.0f}"] for name, used in figures["microseconds"].items()),
        ),
    ]


def processor_section(
    ways: Mapping[str, Mapping[str, float]], *, table: Callable[[Sequence[str], Any], list[str]]
) -> list[str]:
    """The section of ``docs/benchmarks.md`` on the processor time."""
    return [
        "## Processor time of a call",
        "",
        "One caller, back to back, one message and one row: milliseconds of processor time for each call, of this process with "
        "all its threads, librdkafka's included, of the caller's thread alone, and of the servers; the ways in turn, in slices. "
        "The outbox's relay, a process of its own, is left out, but what the servers do for it is not.",
        "",
        *table(
            ("way", "process", "caller", BROKER, POSTGRESQL, "together", "process, to unsafe"),
            (
                [
                    name,
                    *(f"{way[figure]:.2f}" for figure in ("process", "caller", BROKER, POSTGRESQL)),
                    f"{together(way):.2f}",
                    f"{way['process'] / ways[UNSAFE]['process']:.1f}",
                ]
                for name, way in ways.items()
            ),
        ),
        f"- A dual write against the unsafe way: **{ways[NATIVE]['process'] / ways[UNSAFE]['process']:.1f}** (aim: at most 3.5).",
        f"- Once all cores are busy, the writes per second go by what all processes use together. By these, a dual write can reach "
        f"**{together(ways[UNSAFE]) / together(ways[NATIVE]):.2f}** of the unsafe way's, and the same two transactions one after the "
        f"other, without a protocol, {together(ways[UNSAFE]) / together(ways[SEQUENTIAL]):.2f}.",
        "",
    ]
