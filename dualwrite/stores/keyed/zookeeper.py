"""``ZooKeeperDatabase``: ZooKeeper decides dual writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError
from kazoo.retry import KazooRetry

from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.interfaces__ports_database import Traits
from dualwrite.stores.keyed.store__stores_keyed_database import KeyedDatabase
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_failures import requests
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_forgetting import ZooKeeperForgetting
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_handle import ZooKeeperHandle
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_keys import ZooKeeperKeys
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_multi import JUTE_MAXBUFFER, LEAST_MAXBUFFER
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_paths import FORMAT, Paths
from dualwrite.stores.keyed.zookeeper__stores_zookeeper_session import Session

if TYPE_CHECKING:
    from kazoo.security import ACL
    from typing_extensions import Self

    from dualwrite.interfaces__ports_database import Forgetting

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
        """See the port. Makes the znodes that are missing."""
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
        """See the port."""
        return ZooKeeperKeys(self._opened(), self._jute_maxbuffer)

    def new_handle(self) -> ZooKeeperHandle:
        """See the port."""
        return ZooKeeperHandle(self._opened(), self._jute_maxbuffer)

    def forgetting(self) -> Forgetting:
        """See the port."""
        return ZooKeeperForgetting(self.keys)

    def forked(self) -> None:
        """See the port. A client of your own is as it was."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self._kazoo.hosts)
        return f"<ZooKeeperDatabase {hosts}{self._kazoo.chroot}{self._paths.root}>"
