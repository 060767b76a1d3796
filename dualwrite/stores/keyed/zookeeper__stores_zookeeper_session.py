"""Requests to ZooKeeper through one kazoo client. kazoo repeats none of them, and no answer is waited for without a limit."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kazoo import exceptions as kazoo_errors
from kazoo.protocol.serialization import Transaction
from kazoo.security import OPEN_ACL_UNSAFE

from dualwrite.clock import Deadline
from dualwrite.errors import TransactionAborted, Unavailable
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_failures import requests

if TYPE_CHECKING:
    from kazoo.client import KazooClient, TransactionRequest
    from kazoo.security import ACL

    from dualwrite.stores.keyed.zookeeper__stores_zookeeper_paths import Paths

_HEADER_BYTES: Final = 8
"""The number and the type of a request."""


class Session:
    """The client's session, and the requests of the library. Used by many threads.

    Args:
        kazoo: A started client.
        paths: The library's paths.
        acl: The ACL of the znodes to come; the client's default one if None.
        answer_s: How long an answer is waited for, in seconds.
    """

    def __init__(self, kazoo: KazooClient, paths: Paths, acl: Sequence[ACL] | None, answer_s: float) -> None:
        self.kazoo = kazoo
        self.paths = paths
        self.acl = list(acl or kazoo.default_acl or OPEN_ACL_UNSAFE)
        self._answer_s = answer_s
        self._alive: tuple[int, str] | None = None
        self._making = threading.Lock()

    def read(self, paths: Sequence[str]) -> Mapping[str, tuple[bytes, int]]:
        """The newest content and version of each of these znodes; those that do not exist are left out.

        Raises:
            ConfigurationError: The session has no right to read one.
            Unavailable: ZooKeeper does not answer.
        """
        answers = self._newest([self.kazoo.get_async] * len(paths), paths)
        return {path: (found[0], found[1].version) for path, found in answers.items()}

    def children(self, path: str) -> Sequence[str]:
        """The newest names of a znode's children; none if it does not exist.

        Raises:
            ConfigurationError, Unavailable: As :meth:`read`.
        """
        found: Sequence[str] = self._newest([self.kazoo.get_children_async], [path]).get(path, [])
        return found

    def _newest(self, ask: Sequence[Any], paths: Sequence[str]) -> Mapping[str, Any]:
        """Ask a server for all of them after it has caught up with the leader: a follower may be behind.

        The answers to one session come in order, also after it has moved to another server. Only a new session may begin with a
        server that is behind.
        """
        deadline = Deadline(self._answer_s)
        found = {}
        with requests(self.paths.root):
            session = self.kazoo.client_id
            synced = self.kazoo.sync_async(self.paths.root)
            asked = [(path, question(path)) for question, path in zip(ask, paths, strict=True)]
            synced.get(timeout=deadline.remaining_s())
        for path, answer in asked:
            with requests(path):
                try:
                    found[path] = answer.get(timeout=deadline.remaining_s())
                except kazoo_errors.NoNodeError:
                    continue
        if None not in {session, now := self.kazoo.client_id} and now != session:
            raise Unavailable("the session with ZooKeeper has expired", next_step="try again")
        return found

    def new(self) -> TransactionRequest:
        """A ``multi`` without operations."""
        return self.kazoo.transaction()

    def owns(self, request: TransactionRequest) -> bool:
        """Whether an operation of it is about a path of the library's own, however it was written."""
        return any(self.paths.owns(self.kazoo.unchroot(one.path)) for one in request.operations)

    def send(self, request: TransactionRequest, answer_s: float | None = None) -> Sequence[Any]:
        """Send a ``multi`` once, and return the result of each operation: an exception for each if one has failed.

        Args:
            request: Its operations.
            answer_s: How long to wait for the answer, in seconds; as for other requests if None.

        Raises:
            Exception: Any of kazoo's: it is not known whether it was, or will be, carried out.
        """
        results: Sequence[Any] = request.commit_async().get(timeout=self._answer_s if answer_s is None else answer_s)
        return results

    def alive(self) -> str:
        """The path of a znode that exists while the present session lives, and never again.

        Raises:
            ConfigurationError, Unavailable: As :meth:`read`.
        """
        with self._making:
            session = self.kazoo.client_id
            if self._alive is None or session is None or self._alive[0] != session[0]:
                path = f"{self.paths.sessions}/{secrets.token_hex(8)}"
                with requests(self.paths.sessions):
                    made = self.kazoo.create_async(path, b"", acl=self.acl, ephemeral=True, include_data=True)
                    self._alive = made.get(timeout=self._answer_s)[1].ephemeralOwner, path
            return self._alive[1]

    def require_connected(self) -> None:
        """Refuse to send a decision into a connection that is lost: kazoo would keep it until it has another one.

        Raises:
            TransactionAborted: It is.
        """
        if not self.kazoo.connected:
            raise TransactionAborted("the connection to ZooKeeper was lost before the multi was sent")


def size_of(request: TransactionRequest) -> int:
    """The bytes of the request, as ``jute.maxbuffer`` counts them."""
    return len(Transaction(request.operations).serialize()) + _HEADER_BYTES


def first_failure(results: Sequence[Any]) -> tuple[int, Exception] | None:
    """The number of the operation that made a ``multi`` fail, and its error; None if none has."""
    for number, result in enumerate(results):
        if isinstance(result, Exception) and not isinstance(result, kazoo_errors.RolledBackError):
            return number, result
    return None
