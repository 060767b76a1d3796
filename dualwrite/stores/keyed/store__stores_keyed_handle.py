"""The handle on which one dual write works in a database without SQL."""

from __future__ import annotations

from dualwrite.stores.keyed.store__stores_keyed_keys import Change


class KeyedHandle:
    """The user's part of a dual write, and the library's own changes. A subclass holds the user's part. Used by one thread.

    Attributes:
        begun: Whether a dual write has begun on it, and not ended.
        changes: The library's own changes, which commit with the user's part.
    """

    def __init__(self) -> None:
        self.begun = False
        self.changes: list[Change] = []

    def clear(self) -> None:
        """Forget all that the user has put. Called as a dual write begins, and once it has ended, in any way."""

    def end(self) -> None:
        """Refuse any further use by the user: the block has ended."""
