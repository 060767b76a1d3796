"""The note that a commit writes with the data, and its text on disk. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from dualwrite.errors import StoreUnreadable

_FORMAT: Final = 1


@dataclass(frozen=True)
class Committed:
    """A store's last commit. It stands in the same batch as the data.

    Attributes:
        offset: The first offset of the changelog that is not in the store; None before the first commit with an offset.
        at_ms: When the store equalled its changelog up to the offset: ms since 1970, by this machine's clock.
        changelog: The changelog that the store follows, as given to :meth:`KeyValueStore.follow`; None without one.
        format: The version of the directory's format.
    """

    offset: int | None = None
    at_ms: int = 0
    changelog: str | None = None
    format: int = _FORMAT


def as_text(committed: Committed) -> bytes:
    """The note as it stands on disk."""
    return json.dumps(asdict(committed)).encode()


def parsed(note: bytes | None, path: object) -> Committed:
    """The note read from disk; the one of an empty store if there is none.

    Args:
        note: Its text.
        path: The store's directory, for the error.

    Raises:
        StoreUnreadable: It is of another version.
    """
    if note is None:
        return Committed()
    found = json.loads(note)
    if found.get("format") != _FORMAT:
        raise StoreUnreadable(f"the state store {path} is of format {found.get('format')}, not {_FORMAT}")
    return Committed(**found)
