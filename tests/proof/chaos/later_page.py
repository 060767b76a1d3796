"""The section of the report about later runs, whose plan has more than that of the first ones: each is shown by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chaos.results import Results
from chaos.tables import sum_of, table

_KEPT: Final = (
    "command",
    "began",
    "engine",
    "brokers",
    "killed",
    "members",
    "spoiled",
    "ways",
    "zombies",
    "suspended",
    "broker_kills",
    "broker_suspensions",
    "database_stops",
    "database_suspensions",
    "outages_killed",
    "outages_suspended",
    "away_s",
    "leaderless",
    "hanging",
    "operations",
    "findings",
)
NOT_KEPT: Final = "-"


def later_of(run: Results) -> dict[str, Any]:
    """The figures of one such run."""
    return {**{name: getattr(run, name) for name in _KEPT}, "minutes": round(run.seconds / 60)}


def killed_by(runs: Iterable[Mapping[str, Any]]) -> int:
    return sum(sum_of(run["killed"]) for run in runs)


def section(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section as lines of Markdown; empty if there is no such run."""
    if not runs:
        return []
    databases = sorted({database for run in runs for database in run["killed"]})
    by_point = {database: Counter[str]() for database in databases}
    for run in runs:
        for database, counts in run["killed"].items():
            by_point[database].update(counts)
    return [
        "## Group commit, tasks and fleets",
        "",
        "Later runs, of later code. Their plan has these besides all the rest. Writers use blocks or sessions that are bound, "
        "in threads or in tasks of an event loop; where several threads or tasks write at once, some write by "
        "[group commit](group-commit.md): each caller has several units under way. Some "
        "units fail on purpose. Others end the session of their whole group, so that the rest of it runs again. The members of a "
        "[fleet](fleets.md) lease their ids for three seconds. They are killed while they take an id, at a heartbeat, while they "
        "write, while they settle for another member, and while they close; or paused for longer than the lease. At the end a "
        "member that nobody kills lives until no other id is left to settle.",
        "",
        "Besides the rest, the checker finds out whether two members have decided under one incarnation of an id. In the runs "
        "since 24 November, PostgreSQL itself notes whether a lease is taken from a member whose time is not over, and whether anybody decides under an id "
        "that another has settled and given back. A planted `leased_while_its_holder_lives` is found so. A planted "
        "`dead_members_id_left_unclaimed` is not shown to be found here: `tests/unit/writing/test_leased.py` finds it.",
        "",
        *_without_decisions(runs),
        *_what(runs),
        *_suspended(runs),
        *_outages(runs),
        *_by_way(runs),
        *table(databases, [by_point[database] for database in databases]),
        "",
    ]


def _without_decisions(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A word on the runs whose members have decided nothing: what they do not show."""
    hollow = [f"`{run['command']}`" for run in runs if not run["operations"].get("decided_by_members")]
    if not hollow:
        return []
    return [
        f"In {', '.join(hollow)} no operation of a member of a fleet was committed: the test's own statement beside it named a table "
        "that does not exist, so each was aborted. These runs show how members lease, claim, settle and die, and nothing of "
        "what members decide. Most of the operations that are not on both sides are theirs.",
        "",
    ]


def _what(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "| run | date (UTC) | engine | minutes | killed | members of fleets | while units ran again | zombies | broker kills | "
        "stops of PostgreSQL | operations | on both sides | findings |",
        f"|---|---|---|{'---|' * 10}",
        *(
            f"| `{run['command']}` | {run['began']} | {run['engine']} | {run['minutes']} | {sum_of(run['killed']):,} | "
            f"{run['members']:,} | {run['spoiled']:,} | {sum_of(run['zombies']):,} | {run['broker_kills']:,} | "
            f"{run['database_stops']:,} | {run['operations']['operations']:,} | {run['operations']['present']:,} | "
            f"{len(run['findings'])} |"
            for run in runs
        ),
        "",
    ]


def _suspended(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "What was suspended (SIGSTOP, then SIGCONT), and how often a partition had no leader meanwhile:",
        "",
        "| run | engine | brokers | processes | a broker | PostgreSQL | no leader |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{run['command']}` | {run['engine']} | {_count(run, 'brokers')} | {sum_of(run['suspended']):,} | "
            f"{_count(run, 'broker_suspensions')} | {_count(run, 'database_suspensions')} | {_count(run, 'leaderless')} |"
            for run in runs
        ),
        "",
    ]


def _outages(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    with_outages = [run for run in runs if run.get("away_s")]
    if not with_outages:
        return []
    return [
        "Kafka was away, all brokers at once, for 2 to 120 seconds; of the writers with names of "
        "their own half fall back meanwhile, and a quarter lets its messages always wait; members of fleets and Spark's tasks have no "
        "outbox. The checker then also holds the order: what a writer has acknowledged before another of its "
        "operations began comes first in each partition. Where the messages that waited are counted, by the header that they "
        "have, one process dies at the beginning of each outage, as its messages come to wait; another one opens meanwhile; and "
        "a third one dies, or is paused and replaced, as it sends what they have left. A round with outages in which no message "
        "waited is a finding.",
        "",
        "| run | outages (SIGKILL) | outages (SIGSTOP) | minutes away | messages that waited |",
        "|---|---|---|---|---|",
        *(
            f"| `{run['command']}` | {run['outages_killed']:,} | {run['outages_suspended']:,} | {run['away_s'] / 60:.0f} | "
            f"{_count(run['operations'], 'waited')} |"
            for run in with_outages
        ),
        "",
        "Two planted mistakes show in the first round of `make chaos N=30 SEED=3 OUTAGES=1 MISTAKE=...`: "
        "`sends_although_messages_wait` as 36 operations out of order, `pending_state_overwritten` as three recorded losses and "
        "three errors. A third, `settler_commits_whatever_is_open`, does not show in the first round, of 21 killed processes with "
        "two outages; a scenario [finds it](proof-mistakes.md).",
        "",
    ]


def _by_way(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    counted = [run for run in runs if run.get("ways")]
    if not counted:
        return []
    commands = [f"`{run['command']}`" for run in counted]
    rows = [[way, *(f"{run['ways'].get(way, 0):,}" for run in counted)] for way in _ways(counted)]
    return [
        "Killed processes by the way they write:",
        "",
        f"| way | {' | '.join(commands)} |",
        f"|---|{'---|' * len(counted)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _ways(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({way for run in runs for way in run["ways"]})


def _count(run: Mapping[str, Any], name: str) -> str:
    return f"{run[name]:,}" if name in run else NOT_KEPT
