"""One dual write's part in ZooKeeper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_multi import Multi, Operations

if TYPE_CHECKING:
    from dualwrite.stores.keyed.zookeeper__stores_zookeeper_session import Session


class ZooKeeperHandle(KeyedHandle):
    """The user's operations, and the session in which the dual write has begun.

    It decides only in that session: an owner that was paused for longer than the session's timeout finds that it has expired,
    and decides nothing that Kafka may have aborted meanwhile.

    Raises:
        ConfigurationError, Unavailable: As the session's requests.
    """

    def __init__(self, session: Session, jute_maxbuffer: int) -> None:
        super().__init__()
        self.operations = Operations(session, jute_maxbuffer)
        self.multi = Multi(self.operations)
        self.alive = session.alive()

    def clear(self) -> None:
        """Forget the user's operations."""
        super().clear()
        self.operations.clear()

    def end(self) -> None:
        """Refuse further operations."""
        super().end()
        self.operations.end()
