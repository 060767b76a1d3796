"""``Multi``: the user's operations of one dual write, which ZooKeeper carries out with its decision, or none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from dualwrite.errors import ConfigurationError, IllegalStateError
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_session import size_of

if TYPE_CHECKING:
    from kazoo.client import TransactionRequest
    from kazoo.security import ACL

    from dualwrite.stores.keyed.zookeeper__stores_zookeeper_session import Session

JUTE_MAXBUFFER: Final = 0xFFFFF
"""ZooKeeper's own limit of a request, in bytes."""
_OURS: Final = 68 * 1024
"""The most bytes that the library's own part of a ``multi`` takes."""
LEAST_MAXBUFFER: Final = 2 * _OURS


class Multi:
    """The operations of one dual write. They take effect when its block ends, with its messages, or not at all.

    Paths are kazoo's, below the client's chroot. Nothing is sent before the block ends, so no operation sees another's effect
    before that; make what you read meanwhile, with a client of your own, a condition by its version: ``check(path,
    stat.version)``. If a condition does not hold, nothing of the dual write happens: the block raises `TransactionAborted`,
    whose cause is kazoo's error, with ``retryable`` if a version had changed.

    Raises:
        IllegalStateError: Raised by the methods: the block has ended.
        ConfigurationError: Raised by the methods: with this operation the request would exceed ``jute.maxbuffer``, or it is one
            that a dual write does not take. It is not part of the dual write.
        TypeError: Raised by the methods: an argument is of another type.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def create(
        self,
        path: str,
        value: bytes = b"",
        acl: Sequence[ACL] | None = None,
        *,
        ephemeral: bool = False,
        sequence: bool = False,
    ) -> None:
        """Create a znode; its parent must exist.

        Args:
            path: Its path.
            value: Its content.
            acl: Its ACL; the client's default one if None.
            ephemeral: Refused: the znode would go with the writer's session, although its message stays.
            sequence: Append a number to the path, as ZooKeeper counts.
        """
        if ephemeral:
            raise ConfigurationError(
                "a dual write creates no ephemeral znode: it would vanish with the session, and its message would stay",
                next_step="create a persistent one",
            )
        self._operations.add(f"create({path!r})", path, "create", value, acl, sequence=sequence)

    def set_data(self, path: str, value: bytes, version: int = -1) -> None:
        """Replace a znode's content, if it has this version; -1 is any."""
        self._operations.add(f"set_data({path!r})", path, "set_data", value, version)

    def delete(self, path: str, version: int = -1) -> None:
        """Delete a znode without children, if it has this version; -1 is any."""
        self._operations.add(f"delete({path!r})", path, "delete", version)

    def check(self, path: str, version: int) -> None:
        """Require that a znode has this version; -1 requires only that it exists."""
        self._operations.add(f"check({path!r}, {version})", path, "check", version)

    def __len__(self) -> int:
        return len(self._operations.names)

    def __repr__(self) -> str:
        return f"<Multi of {len(self)} operations, {self._operations.size} bytes>"


class Operations:
    """The operations of a ``Multi`` on their way to the request that decides: for the library alone.

    Attributes:
        names: Each of them, for people.
        size: Their size in a request, in bytes.
    """

    def __init__(self, session: Session, jute_maxbuffer: int = JUTE_MAXBUFFER) -> None:
        self._session = session
        self._limit = jute_maxbuffer - _OURS
        self._ended = False
        self._request = session.new()
        self.names: list[str] = []
        self.size = 0

    def add(self, named: str, path: str, kind: str, *arguments: Any, **more: bool) -> None:
        """Append an operation of kazoo's ``TransactionRequest``. Raises as the methods of `Multi`."""
        if self._ended:
            raise IllegalStateError(
                "the dual write has ended, and so has its multi", next_step="use it inside the block"
            )
        one = self._session.new()
        getattr(one, kind)(path, *arguments, **more)
        if self._session.owns(one):
            raise ConfigurationError(f"{path} is the library's own", next_step="use paths outside it, or another root=")
        size = size_of(one)
        if self.size + size > self._limit:
            raise ConfigurationError(
                f"the operations of this dual write would take {self.size + size} bytes with {named}, and {self._limit} fit "
                "into a request beside the decision (jute.maxbuffer)",
                next_step="write less in one dual write; if every server has a greater limit, pass it as jute_maxbuffer=",
            )
        self.size += size
        self.names.append(named)
        self._request.operations += one.operations

    def add_to(self, request: TransactionRequest) -> None:
        """Append the operations to the request that decides."""
        request.operations += self._request.operations

    def clear(self) -> None:
        """Forget all operations."""
        self._request = self._session.new()
        self.names.clear()
        self.size = 0

    def end(self) -> None:
        """Take no more operations."""
        self.clear()
        self._ended = True
