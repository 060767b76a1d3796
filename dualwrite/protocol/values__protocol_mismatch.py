"""Things that do not belong together: a database and a Kafka cluster that disagree, tables and a program of other versions.

The tables change in two kinds of steps, so that programs of neighbouring versions work side by side. A step that *expands* only
adds: tables, and columns that may be left out. The program before it does not see the difference. A step that *contracts* takes
away what only older programs use; its revision is named so (``0007_contract``), since they cannot know it otherwise.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from dualwrite.errors import ConfigurationError, DatabaseWentBack

_REVISION: Final = re.compile(r"([0-9]{4})(_contract)?")


class TableFit(Enum):
    """How the tables' version goes with the program's own."""

    SAME = "the program was made for these tables"
    OLDER = "the tables lack what the program's own step adds, and the program works without it"
    NEWER = "the tables have more than the program knows, and it works as before"
    TOO_OLD = "the tables are more than one step older"
    TOO_NEW = "the tables are more than one step newer"
    CONTRACTED = "the tables are one step newer, and that step has taken away what the program uses"


def table_fit(found: str, own: str) -> TableFit:
    """Whether a program may work with tables of another version: the one before its own, or the one after if that expands.

    A program works with the tables before its own whichever kind its own step is: before a step that contracts is taken, all
    programs must already be of the version that can do without.

    Args:
        found: The tables' revision.
        own: The newest revision that the program knows.
    """
    if found == own:
        return TableFit.SAME
    theirs, ours = _REVISION.fullmatch(found), _REVISION.fullmatch(own)
    if theirs is None or ours is None:
        return TableFit.TOO_NEW  # named in a way that came later
    steps = int(theirs[1]) - int(ours[1])
    if steps == -1:
        return TableFit.OLDER
    if steps == 1:
        return TableFit.NEWER if theirs[2] is None else TableFit.CONTRACTED
    return TableFit.TOO_OLD if steps < 0 else TableFit.TOO_NEW


def other_cluster(row_cluster_id: str, cluster_id: str, transactional_id: str) -> ConfigurationError:
    """The row does not belong to the bootstrap servers' cluster: what is not found there must not be taken for gone."""
    return ConfigurationError(
        f"the row belongs to the Kafka cluster {row_cluster_id!r}, but bootstrap.servers leads to {cluster_id!r}",
        transactional_id=transactional_id,
        next_step="use the address of the right cluster; if the cluster was rebuilt, its messages are gone, and a "
        "person must decide what to do with this row",
    )


def gone_back(
    seen: str, transactional_id: str, forgotten: str | None = None, *, recorded: bool = False
) -> DatabaseWentBack:
    """The database has lost commits, or Kafka has followed a copy of it.

    Args:
        seen: The evidence, in words.
        transactional_id: The row's id.
        forgotten: The text form of a decision that the database has lost.
        recorded: Whether that is already recorded as an incident, so that the next opening of the writer succeeds.
    """
    next_step = (
        "messages newer than the database's state are visible in Kafka: stop what uses a copy, compare both; it is recorded "
        "as an incident, and the next opening of the writer succeeds"
        if recorded
        else "messages newer than the database's state may be visible in Kafka: stop what uses a copy, compare both, "
        "then run `dualwrite recover --after-restore`"
    )
    return DatabaseWentBack(
        f"{seen}: the database has gone back in time (restored from a backup, or failed over to a copy that was behind), "
        "or a copy of it is in use beside it",
        transactional_id=transactional_id,
        next_step=next_step,
        state=forgotten,
    )
