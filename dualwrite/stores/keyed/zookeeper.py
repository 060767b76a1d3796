"""ZooKeeper as the deciding database: entries as znodes, and the decision in one ``multi``, through kazoo.

A request whose answer is missing may have been carried out; the entry's version shows it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, unquote, urlsplit

from dualwrite.clock import Deadline
from dualwrite.errors import (
    ConfigurationError,
    DualWriteError,
    IllegalStateError,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.interfaces import Traits
from dualwrite.stores.keyed.store import (
    Change,
    Entry,
    Key,
    KeyedDatabase,
    KeyedForgetting,
    KeyedHandle,
)

try:
    from kazoo import exceptions as kazoo_errors
    from kazoo.client import KazooClient
    from kazoo.exceptions import NodeExistsError
    from kazoo.handlers.threading import KazooTimeoutError
    from kazoo.protocol.serialization import Create, Transaction
    from kazoo.recipe.lock import Lock
    from kazoo.retry import KazooRetry
    from kazoo.security import OPEN_ACL_UNSAFE
except ImportError as missing:
    raise ConfigurationError("ZooKeeper needs kazoo", next_step="pip install 'dualwrite[zookeeper]'") from missing

if TYPE_CHECKING:
    from kazoo.client import TransactionRequest
    from kazoo.security import ACL
    from typing_extensions import Self

# `Multi`: the user's operations of one dual write, which ZooKeeper carries out with its decision, or none of them.

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
    """The operations of a ``Multi`` on their way to the request that decides. Only the library uses it."""

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
                "into a request with the decision (jute.maxbuffer)",
                next_step="write less in one dual write; if every server has a greater limit, pass it as jute_maxbuffer=",
            )
        self.size += size
        self.names.append(named)
        self._request.operations += one.operations

    def add_to(self, request: TransactionRequest) -> None:
        request.operations += self._request.operations

    def clear(self) -> None:
        self._request = self._session.new()
        self.names.clear()
        self.size = 0

    def end(self) -> None:
        self.clear()
        self._ended = True


ROOT: Final = "/kafka_transaction_state"
SESSION_TIMEOUT_S: Final = 10.0
_SCHEME: Final = "zookeeper://"


class ZooKeeperDatabase(KeyedDatabase):
    """ZooKeeper as the database of dual writes: ``tx.multi`` takes operations; one request carries them out with the decision.

    Give it to ``DualWriter`` and to the calls for people as ``database=``. Close it after the last of them, or use it as a
    context manager. It connects on first use, and then creates its znodes if they are missing.

    A dual write decides only while the session in which it has begun lives: one that expires meanwhile aborts it, and so an
    owner that was paused for longer than the session's timeout decides nothing.

    Args:
        hosts: The servers as ``host:port,host:port``, with a chroot if you like (``.../app``); or a `KazooClient` that is
            started, which stays yours: its session, credentials and default ACL are used.
        root: The path of the library's znodes.
        auth: Credentials, as kazoo's ``auth_data``: pairs of scheme and credential, such as ``("digest", "user:password")``.
        acl: The ACL of every znode made here, the user's included unless an operation names another: a list of kazoo's, such as
            ``[make_digest_acl("user", "password", all=True)]``. By default anybody may do anything, as in ZooKeeper.
        session_timeout_s: The session timeout to ask for, in seconds; the servers have limits of their own. Keep it
            at or below the writer's ``margin_s``.
        answer_s: How long an answer is waited for, in seconds.
        jute_maxbuffer: The servers' limit of a request in bytes, if you have raised it.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    traits = Traits("ZooKeeper", "multi")

    def __init__(
        self,
        hosts: str | KazooClient,
        *,
        root: str = ROOT,
        auth: Sequence[tuple[str, str]] = (),
        acl: Sequence[ACL] | None = None,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        answer_s: float = 10.0,
        jute_maxbuffer: int = JUTE_MAXBUFFER,
    ) -> None:
        if jute_maxbuffer < LEAST_MAXBUFFER:
            raise ConfigurationError(
                f"jute_maxbuffer={jute_maxbuffer} leaves no room for a dual write",
                next_step=f"let the servers take requests of {LEAST_MAXBUFFER} bytes at least; ZooKeeper's default is 1 MiB",
            )
        self._paths = Paths(root)
        self._acl = acl
        self._answer_s = answer_s
        self._jute_maxbuffer = jute_maxbuffer
        self._owns = isinstance(hosts, str)
        self._opening = threading.Lock()
        self._session: Session | None = None
        self._closed = False
        if not isinstance(hosts, str) and (auth or acl is not None):
            raise ConfigurationError(
                "a client brings its own credentials and ACL", next_step="give it auth_data= and default_acl="
            )
        self._auth = list(auth)
        self._session_timeout_s = session_timeout_s
        self._hosts = hosts
        self._kazoo = self._client(hosts)

    def _client(self, hosts: str | KazooClient) -> KazooClient:
        if not isinstance(hosts, str):
            return hosts
        return KazooClient(
            hosts,
            timeout=self._session_timeout_s,
            auth_data=self._auth,
            default_acl=None if self._acl is None else list(self._acl),
            # kazoo's own pauses grow to an hour.
            connection_retry=KazooRetry(max_tries=-1, delay=0.1, backoff=2, max_delay=1.0),
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The database of ``zookeeper://[user:password@]host:port,host:port[/chroot]``, with digest credentials if given.

        Raises:
            ConfigurationError: It is no such URL.
        """
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        if not url.startswith(_SCHEME) or not hosts or parts.query or parts.fragment:
            raise ConfigurationError(
                "this is no URL of ZooKeeper servers", next_step=f"write {_SCHEME}host:2181,host:2181/chroot"
            )
        return cls(hosts + parts.path.rstrip("/"), auth=[("digest", unquote(login))] if login else ())

    def check(self) -> None:
        """Makes the znodes that are missing."""
        session = self._opened()
        found = session.read(self._paths.all)
        content = found.get(self._paths.root, (FORMAT, 0))[0]
        if content != FORMAT:
            raise ConfigurationError(
                f"{self._paths.root} holds {content[:20]!r}, not {FORMAT.decode()!r}",
                next_step="it belongs to another version of this library, or to something else: give another root=",
            )
        if self._paths.root not in found:
            self._make_chroot(session)
        for path in self._paths.all:
            if path not in found:
                with requests(path), suppress(NodeExistsError):  # another writer makes them too
                    made = session.kazoo.create_async(path, FORMAT, acl=session.acl, makepath=True)
                    made.get(timeout=self._answer_s)

    def _make_chroot(self, session: Session) -> None:
        """Make the levels of the chroot that are missing: inside it, kazoo makes the last one at most."""
        chroot = self._kazoo.chroot
        if not chroot or session.read(["/"]):
            return
        if not isinstance(self._hosts, str):
            raise ConfigurationError(
                f"the client's chroot {chroot} does not exist", next_step="create it: only a client without chroot can"
            )
        outside = self._client(self._hosts.partition("/")[0])
        try:
            self._start(outside)
            with requests(chroot):
                outside.ensure_path_async(chroot, acl=session.acl).get(timeout=self._answer_s)
        finally:
            outside.stop()
            outside.close()

    def _opened(self) -> Session:
        with self._opening:
            if self._closed:
                raise IllegalStateError("the ZooKeeper database is closed")
            if self._session is None:
                self._connect()
                self._session = Session(self._kazoo, self._paths, self._acl, self._answer_s)
            return self._session

    def _connect(self) -> None:
        if not self._owns:
            if not self._kazoo.connected:
                raise Unavailable("the client of ZooKeeper is not connected", next_step="start() it first")
            return
        self._start(self._kazoo)

    def _start(self, kazoo: KazooClient) -> None:
        # Not start(), which warns of a chroot that is not there yet.
        kazoo.start_async().wait(self._answer_s)
        if not kazoo.connected:
            kazoo.stop()
            raise Unavailable(
                "no server of ZooKeeper accepts the connection",
                next_step="check that a quorum runs there, and that the credentials are right",
            )

    @property
    def keys(self) -> ZooKeeperKeys:
        return ZooKeeperKeys(self._opened(), self._jute_maxbuffer)

    def new_handle(self) -> ZooKeeperHandle:
        return ZooKeeperHandle(self._opened(), self._jute_maxbuffer)

    def forgetting(self) -> KeyedForgetting:
        return KeyedForgetting(self.keys)

    def forked(self) -> None:
        """A client of your own is as it was."""
        self._opening = threading.Lock()
        self._session = None
        self._kazoo = self._client(self._hosts)

    def close(self) -> None:
        """End the session if it is ours. May be called more than once."""
        with self._opening:
            self._closed = True
            self._session = None
            if self._owns:
                self._kazoo.stop()
                self._kazoo.close()

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self._kazoo.hosts)
        return f"<ZooKeeperDatabase {hosts}{self._kazoo.chroot}{self._paths.root}>"


# The library's entries as znodes, and the decision: `multi` requests that happen as a whole or not at all.


class ZooKeeperKeys:
    """Implements :class:`dualwrite.stores.keyed.store.Keys`. Used by many threads."""

    def __init__(self, session: Session, jute_maxbuffer: int) -> None:
        self._session = session
        self._paths = session.paths
        self._limit = jute_maxbuffer

    def get(self, keys: Sequence[Key]) -> Mapping[Key, Entry]:
        named = {self._paths.entry(*key): key for key in keys}
        found = self._session.read(list(named))
        return {named[path]: _entry(path, content, version) for path, (content, version) in found.items()}

    def scan(self, table: str, prefix: str) -> Mapping[Key, Entry]:
        names = [unquoted(part) for part in self._session.children(self._paths.table(table))]
        return self.get([(table, name) for name in names if name.startswith(prefix)])

    def write(self, changes: Sequence[Change]) -> bool:
        request = self._session.new()
        self._require(request, changes)
        if size_of(request) > self._limit:
            raise ConfigurationError(
                f"{len(changes)} entries at once take more than the {self._limit} bytes of a request (jute.maxbuffer)",
                next_step="raise it on every server, and pass it: jute_maxbuffer=",
            )
        return self._sent(request)

    def erase(self, entries: Mapping[Key, Entry]) -> bool:
        request = self._session.new()
        for key, entry in entries.items():
            path = self._paths.entry(*key)
            life, version = cast("tuple[str, int]", entry.version)
            request.delete(f"{path}/{life}")
            request.delete(path, version)
        return self._sent(request)

    def _sent(self, request: TransactionRequest) -> bool:
        with requests(self._paths.root):
            failure = first_failure(self._session.send(request))
        if failure is None:
            return True
        number, error = failure
        if isinstance(error, NOT_AS_EXPECTED) and not _parent_is_gone(request, number, error):
            return False
        raise mapped(error, self._paths.root) from error

    def commit(self, handle: KeyedHandle, changes: Sequence[Change], *, answer_s: float | None) -> bool:
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
        """If our session expires meanwhile, another process may hold them too."""
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
    """If ZooKeeper does not answer, the lock goes with the session."""
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


# Requests to ZooKeeper through one kazoo client. kazoo repeats none of them, and no answer is waited for without a
# limit.

_HEADER_BYTES: Final = 8


class Session:
    """The client's session, and the requests of the library. Used by many threads."""

    def __init__(self, kazoo: KazooClient, paths: Paths, acl: Sequence[ACL] | None, answer_s: float) -> None:
        self.kazoo = kazoo
        self.paths = paths
        self.acl = list(acl or kazoo.default_acl or OPEN_ACL_UNSAFE)
        self._answer_s = answer_s
        self._alive: tuple[int, str] | None = None
        self._making = threading.Lock()

    def read(self, paths: Sequence[str]) -> Mapping[str, tuple[bytes, int]]:
        """The newest content and version of each of these znodes; those that do not exist are left out."""
        answers = self._newest([self.kazoo.get_async] * len(paths), paths)
        return {path: (found[0], found[1].version) for path, found in answers.items()}

    def children(self, path: str) -> Sequence[str]:
        """The newest names of a znode's children; none if it does not exist."""
        found: Sequence[str] = self._newest([self.kazoo.get_children_async], [path]).get(path, [])
        return found

    def _newest(self, ask: Sequence[Any], paths: Sequence[str]) -> Mapping[str, Any]:
        """Ask a server for all of them after it has caught up with the leader: a follower may be behind.

        The answers to one session come in order, even from another server: only a new session may begin with one that is
        behind.
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
        return self.kazoo.transaction()

    def owns(self, request: TransactionRequest) -> bool:
        """Whether an operation of it is about a path of the library's own, however it was written."""
        return any(self.paths.owns(self.kazoo.unchroot(one.path)) for one in request.operations)

    def send(self, request: TransactionRequest, answer_s: float | None = None) -> Sequence[Any]:
        """Send a ``multi`` once, and return the result of each operation: an exception for each if one has failed.

        After any error of kazoo's it is not known whether it was, or will be, carried out.
        """
        results: Sequence[Any] = request.commit_async().get(timeout=self._answer_s if answer_s is None else answer_s)
        return results

    def alive(self) -> str:
        """The path of a znode that exists while the present session lives, and never again."""
        with self._making:
            session = self.kazoo.client_id
            if self._alive is None or session is None or self._alive[0] != session[0]:
                path = f"{self.paths.sessions}/{secrets.token_hex(8)}"
                with requests(self.paths.sessions):
                    made = self.kazoo.create_async(path, b"", acl=self.acl, ephemeral=True, include_data=True)
                    self._alive = made.get(timeout=self._answer_s)[1].ephemeralOwner, path
            return self._alive[1]

    def require_connected(self) -> None:
        """Refuse to send a decision into a connection that is lost: kazoo would keep it until it has another one."""
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


# The paths of the library's znodes, and what a znode holds.
#
# ::
#
#     /kafka_transaction_state                       "dualwrite 1"
#         /state/orders%2Feu                         "dualwrite 1 8f2c...", a line end, the entry
#             /8f2c...                               empty: this life of the znode
#         /incident/...                              likewise
#         /lock/...                                  ephemeral, while a settler works on an entry
#         /session/5b1d...                           ephemeral, while the session of a writer lives
#
# A znode that is deleted and created again counts its versions from 0: a condition on the version alone would then hold
# for another life of it. So each life has a name, its child, which every write requires.

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
        return f"{self.root}/{table}"

    def entry(self, table: str, name: str) -> str:
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
    """The name of the znode's life, and the entry; refused if this version of the library has not written it."""
    head, separator, value = content.partition(b"\n")
    words = head.split(b" ")
    if not separator or b" ".join(words[:2]) != FORMAT or len(words) != 3:  # noqa: PLR2004 - product, format, life
        raise ConfigurationError(
            f"bad znode {path}: it begins with {content[:20]!r}",
            next_step="it was edited, or written by another version of this library: restore it before anything is settled",
        )
    return words[2].decode("ascii", "replace"), value


# kazoo's errors mapped to ours: the class says what the caller must do. No message holds a credential.

NOT_AS_EXPECTED: Final = (
    kazoo_errors.BadVersionError,
    kazoo_errors.NoNodeError,
    kazoo_errors.NodeExistsError,
    kazoo_errors.NotEmptyError,
)
FAILED: Final = (kazoo_errors.KazooException, KazooTimeoutError)
_REFUSED: Final = (kazoo_errors.NoAuthError, kazoo_errors.AuthFailedError)


def mapped(error: Exception, path: str) -> DualWriteError:
    """Our error for one of kazoo's, when the library's own request failed."""
    named = type(error).__name__
    if isinstance(error, _REFUSED):
        return ConfigurationError(
            f"ZooKeeper refuses our session at {path} ({named})",
            next_step="give the credentials that the ACL of this path names, such as auth=[('digest', 'user:password')]; all "
            "rights on it are needed",
        )
    if isinstance(error, kazoo_errors.InvalidACLError):
        return ConfigurationError(f"ZooKeeper rejects the ACL for {path}", next_step="see acl=")
    if isinstance(error, kazoo_errors.NoNodeError):
        return ConfigurationError(f"{path} is gone", next_step="restore it before anything is settled")
    if isinstance(error, kazoo_errors.BadArgumentsError):
        return ConfigurationError(f"ZooKeeper rejects the path {path}", next_step="see root=")
    return Unavailable(f"ZooKeeper does not answer ({named})", next_step="check that a quorum of the ensemble runs")


@contextmanager
def requests(path: str) -> Generator[None, None, None]:
    """Map what the library's own requests raise in the block."""
    try:
        yield
    except FAILED as error:
        raise mapped(error, path) from error


# One dual write's part in ZooKeeper.


class ZooKeeperHandle(KeyedHandle):
    """The user's operations, and the session in which the dual write has begun: it decides only in that one.

    So an owner that was paused for longer than the session's timeout decides nothing that Kafka may have aborted meanwhile.
    """

    def __init__(self, session: Session, jute_maxbuffer: int) -> None:
        super().__init__()
        self.operations = Operations(session, jute_maxbuffer)
        self.multi = Multi(self.operations)
        self.alive = session.alive()

    def clear(self) -> None:
        super().clear()
        self.operations.clear()

    def end(self) -> None:
        super().end()
        self.operations.end()
