"""The settings with which a RocksDB could lose a decision. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

Sections = Mapping[str, Mapping[str, str]]

_SECTION: Final = re.compile(r'\[([^\s\]]+)(?: "(.*)")?\]')
_FATAL: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("wal_recovery_mode", "kSkipAnyCorruptedRecords"): (
        "skips damaged records of the write-ahead log and keeps later ones: a decision could be lost unseen",
        "use DBRecoveryMode.tolerate_corrupted_tail_records(), or point_in_time()",
    ),
    ("manual_wal_flush", "true"): ("leaves written records in the process's memory", "open it without"),
    ("paranoid_checks", "false"): (
        "continues after a failed write, on a damaged log: what is synced later may be lost in a crash",
        "leave set_paranoid_checks(True), the default",
    ),
    ("avoid_flush_during_recovery", "true"): (
        "shows records of the log after a crash that were never synced: the next crash may take them back",
        "open it without",
    ),
    ("best_efforts_recovery", "true"): (
        "opens an older state if files are missing, without an error",
        "open it without",
    ),
}
"""Settings of the database that are refused, with the reason and the advice."""


def parse(text: str) -> Sections:
    """The sections of a RocksDB ``OPTIONS`` file: ``DBOptions``, and ``CFOptions NAME`` for each column family."""
    sections: dict[str, dict[str, str]] = {}
    inside: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        if (begun := _SECTION.fullmatch(line)) is not None:
            inside = sections.setdefault(" ".join(part for part in begun.groups() if part), {})
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            inside[name] = value
    return sections


def refusals(sections: Sections, families: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each setting that is refused: why, and what to do.

    Args:
        sections: As RocksDB has written them.
        families: The column families that hold the state.
    """
    database = sections.get("DBOptions", {})
    for (name, value), (why, advice) in _FATAL.items():
        if database.get(name) == value:
            yield f"{name}={value} {why}", advice
    for family in families:
        options = sections.get(f"CFOptions {family}", {})
        if options.get("compaction_style") == "kCompactionStyleFIFO":
            yield f"FIFO compaction deletes the oldest rows of {family}", "create that column family without it"
        if any(_is_set(options.get(name)) for name in ("compaction_filter", "compaction_filter_factory")):
            yield (
                f"a compaction filter, such as that of a time to live, deletes rows of {family}",
                "open the database without AccessType.with_ttl()",
            )


def _is_set(value: str | None) -> bool:
    return value not in {None, "", "nullptr"}
