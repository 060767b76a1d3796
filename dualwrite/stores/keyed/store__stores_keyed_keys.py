"""The five primitives of which a database without SQL gets its state store."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle

Key: TypeAlias = tuple[str, str]
"""A table, and a name in it: at most 320 characters, none of them a control character."""

STATE: Final = "state"
INCIDENT: Final = "incident"


@dataclass(frozen=True)
class Entry:
    """A value as it was read.

    Attributes:
        value: JSON.
        version: Differs from that of every earlier value of the key.
    """

    value: bytes
    version: Hashable


@dataclass(frozen=True)
class Change:
    """One key of an atomic write.

    Attributes:
        key: The key.
        expected: As it was read, which is the condition; None if it must not exist.
        value: The new value; None to leave it, and only state the condition: then ``expected`` is given.
    """

    key: Key
    expected: Entry | None
    value: bytes | None


class Keys(Protocol):
    """Keys and values of one database, for all processes that use it. Thread-safe. No key is ever deleted."""

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        """The newest committed values; missing keys are left out.

        Raises:
            Unavailable: The database does not answer.
        """
        ...

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        """All keys of the table whose name begins with the prefix, with their newest committed values.

        Raises:
            Unavailable: The database does not answer.
        """
        ...

    def write(self, changes: Sequence[Change]) -> bool:
        """Write all changes or none. Durable on return.

        Returns:
            False if a key was not as expected: nothing was written.

        Raises:
            Unavailable: The database does not answer. It may have been written.
        """
        ...

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        """Write what the user has put into the handle, and the changes, all or nothing: the decision. Durable on return.

        Args:
            handle: The handle of a dual write.
            changes: The library's own changes.
            answer_s: How long to wait for the answer, in seconds; None waits forever.

        Returns:
            False if a key of ``changes`` was not as expected: nothing was written.

        Raises:
            TransactionAborted: It was certainly not written, for instance because a condition of the user's own does not hold.
            TransactionInDoubt: The answer is missing.
        """
        ...

    def locked(self, keys: Sequence[Key], within_s: float) -> AbstractContextManager[None]:
        """Hold a lock on these keys across processes. It need not stop :meth:`write` or :meth:`commit`.

        Raises:
            Unavailable: They were not free within ``within_s`` seconds, or the database does not answer.
        """
        ...
