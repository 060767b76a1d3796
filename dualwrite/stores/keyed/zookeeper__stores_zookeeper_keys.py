"""The library's entries as znodes, and the decision: ``multi`` requests that happen as a whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

from kazoo import exceptions as kazoo_errors
from kazoo.protocol.serialization import Create
from kazoo.recipe.lock import Lock

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, TransactionAborted, TransactionInDoubt, Unavailable
from dualwrite.stores.keyed.store__stores_keyed_keys import Change, Entry, Key
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_failures import NOT_AS_EXPECTED, mapped, requests
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_handle import ZooKeeperHandle
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_paths import packed, unpacked, unquoted
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_session import Session, first_failure, size_of

if TYPE_CHECKING:
    from kazoo.client import TransactionRequest

    from dualwrite.stores.keyed.store__stores_keyed_handle import KeyedHandle


class ZooKeeperKeys:
    """Implements :class:`dualwrite.stores.keyed.store__stores_keyed_keys.Keys`. Used by many threads.

    Args:
        session: The session with ZooKeeper.
        jute_maxbuffer: The servers' limit of a request, in bytes.
    """

    def __init__(self, session: Session, jute_maxbuffer: int) -> None:
        self._session = session
        self._paths = session.paths
        self._limit = jute_maxbuffer

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        """See the port."""
        named = {self._paths.entry(*key): key for key in keys}
        found = self._session.read(list(named))
        return {named[path]: _entry(path, content, version) for path, (content, version) in found.items()}

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        """See the port."""
        names = [unquoted(part) for part in self._session.children(self._paths.table(table))]
        return self.get([(table, name) for name in names if name.startswith(prefix)])

    def write(self, changes: Sequence[Change]) -> bool:
        """See the port."""
        request = self._session.new()
        self._require(request, changes)
        if size_of(request) > self._limit:
            raise ConfigurationError(
                f"{len(changes)} entries at once take more than the {self._limit} bytes of a request (jute.maxbuffer)",
                next_step="raise it on every server, and pass it: jute_maxbuffer=",
            )
        return self._sent(request)

    def delete(self, entries: Mapping[Key, Entry]) -> bool:
        """Delete all entries or none, if they are as they were read. Durable on return.

        Returns:
            False if one has changed: nothing was deleted.

        Raises:
            ConfigurationError, Unavailable: As :meth:`write`.
        """
        request = self._session.new()
        for key, entry in entries.items():
            path = self._paths.entry(*key)
            life, version = cast("tuple[str, int]", entry.version)
            request.delete(f"{path}/{life}")
            request.delete(path, version)
        return self._sent(request)

    def _sent(self, request: TransactionRequest) -> bool:
        """Whether its conditions held."""
        with requests(self._paths.root):
            failure = first_failure(self._session.send(request))
        if failure is None:
            return True
        number, error = failure
        if isinstance(error, NOT_AS_EXPECTED) and not _parent_is_gone(request, number, error):
            return False
        raise mapped(error, self._paths.root) from error

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
        """See the port."""
        own = cast("ZooKeeperHandle", handle)
        name = changes[0].key[1]
        request = self._session.new()
        self._require(request, changes)
        ours = len(request.operations)
        request.check(own.alive, -1)
        own.operations.add_to(request)
        if (size := size_of(request)) > self._limit:
            raise TransactionAborted(
                f"the decision takes {size} bytes, and a request at most {self._limit} (jute.maxbuffer)",
                transactional_id=name,
                next_step="write to fewer partitions in one dual write",
                retryable=False,
            )
        self._session.require_connected()
        try:
            failure = first_failure(self._session.send(request, answer_s))
        except BaseException as error:
            # Whatever it is: the request may be on its way, and be carried out later.
            raise TransactionInDoubt(
                f"ZooKeeper's answer to the multi is missing ({type(error).__name__})", transactional_id=name
            ) from error
        if failure is None:
            return True
        number, cause = failure
        if number < ours and isinstance(cause, NOT_AS_EXPECTED):
            return False
        raise _refused(own, number - ours, cause, name) from cause

    def _require(self, request: TransactionRequest, changes: Sequence[Change]) -> None:
        """Append the operations that make the changes, if all entries are as expected."""
        for change in changes:
            path = self._paths.entry(*change.key)
            if change.expected is None:
                life = secrets.token_hex(8)
                request.create(path, packed(life, change.value or b""), acl=self._session.acl)
                request.create(f"{path}/{life}", b"", acl=self._session.acl)
                continue
            life, version = cast("tuple[str, int]", change.expected.version)
            if change.value is None:
                request.check(path, version)
            else:
                request.set_data(path, packed(life, change.value), version)
            request.check(f"{path}/{life}", -1)

    @contextmanager
    def locked(self, keys: Sequence[Key], within_s: float) -> Generator[None, None, None]:
        """See the port. If our session expires meanwhile, another process may hold them too."""
        deadline = Deadline(within_s)
        with ExitStack() as held:
            for path in sorted({self._paths.lock(*key) for key in keys}):
                lock = Lock(self._session.kazoo, path)
                with requests(path):
                    if not lock.acquire(timeout=max(0.1, deadline.remaining_s())):
                        raise Unavailable(f"{path} was not free in time")
                held.callback(_release, lock)
            yield


def _entry(path: str, content: bytes, version: int) -> Entry:
    life, value = unpacked(path, content)
    return Entry(value, (life, version))


def _release(lock: Lock) -> None:
    """Release it. If ZooKeeper does not answer, it goes with the session."""
    with requests(lock.path):
        lock.release()


def _parent_is_gone(request: TransactionRequest, number: int, error: Exception) -> bool:
    return isinstance(error, kazoo_errors.NoNodeError) and isinstance(request.operations[number], Create)


def _refused(handle: ZooKeeperHandle, number: int, cause: Exception, name: str) -> TransactionAborted:
    """The error for a decision that was refused: at 0 because of the session, above it because of a user's operation."""
    kind = type(cause).__name__
    if number < 0:
        return TransactionAborted(f"ZooKeeper refuses the decision ({kind})", transactional_id=name, retryable=False)
    if number == 0:
        return TransactionAborted("the session with ZooKeeper expired during the dual write", transactional_id=name)
    return TransactionAborted(
        f"ZooKeeper refuses {handle.operations.names[number - 1]} ({kind})",
        transactional_id=name,
        retryable=isinstance(cause, kazoo_errors.BadVersionError),
    )
