"""The paths of the library's znodes, and what a znode holds.

::

    /kafka_transaction_state                       "dualwrite 1"
        /state/orders%2Feu                         "dualwrite 1 8f2c...", a line end, the entry
            /8f2c...                               empty: this life of the znode
        /incident/...                              likewise
        /lock/...                                  ephemeral, while a settler works on an entry
        /session/5b1d...                           ephemeral, while the session of a writer lives

A znode that is deleted and created again counts its versions from 0: a condition on the version alone would then hold for
another life of it. So each life has a name, its child, which every write requires.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

from dualwrite.errors import ConfigurationError

FORMAT: Final = b"dualwrite 1"
TABLES: Final = ("state", "incident")
_PLAIN: Final = " !\"#$&'()*+,-.:;<=>?@[\\]^_`{|}~"


class Paths:
    """The paths below one root."""

    def __init__(self, root: str) -> None:
        if not root.startswith("/") or root.endswith("/") or "//" in root:
            raise ConfigurationError(
                f"{root!r} cannot be the root of the library's znodes",
                next_step="give an absolute path such as /kafka_transaction_state, not the top of the tree",
            )
        self.root = root
        self.locks = f"{root}/lock"
        self.sessions = f"{root}/session"

    @property
    def all(self) -> list[str]:
        """Every path that must be there, parents first."""
        return [self.root, *(self.table(name) for name in TABLES), self.locks, self.sessions]

    def table(self, table: str) -> str:
        """The parent of a table's entries."""
        return f"{self.root}/{table}"

    def entry(self, table: str, name: str) -> str:
        """The znode of an entry."""
        return f"{self.root}/{table}/{quoted(name)}"

    def lock(self, table: str, name: str) -> str:
        """The znode that exists while a settler works on the entry."""
        return f"{self.locks}/{table},{quoted(name)}"

    def owns(self, path: str) -> bool:
        """Whether the path is the library's own."""
        return path == self.root or path.startswith(f"{self.root}/")


def quoted(name: str) -> str:
    """The name as one part of a path: percent-encoded where ZooKeeper would not take it."""
    found = quote(name, safe=_PLAIN)
    return found.replace(".", "%2E") if found in {".", ".."} else found


def unquoted(part: str) -> str:
    """The name that :func:`quoted` has encoded."""
    return unquote(part)


def packed(life: str, value: bytes) -> bytes:
    """The content of an entry's znode."""
    return b"%s %s\n%s" % (FORMAT, life.encode(), value)


def unpacked(path: str, content: bytes) -> tuple[str, bytes]:
    """The name of the znode's life, and the entry.

    Raises:
        ConfigurationError: This version of the library has not written it.
    """
    head, separator, value = content.partition(b"\n")
    words = head.split(b" ")
    if not separator or b" ".join(words[:2]) != FORMAT or len(words) != 3:  # noqa: PLR2004 - product, format, life
        raise ConfigurationError(
            f"bad znode {path}: it begins with {content[:20]!r}",
            next_step="it was edited, or written by another version of this library: restore it before anything is settled",
        )
    return words[2].decode("ascii", "replace"), value
