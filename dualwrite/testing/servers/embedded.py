"""What the embedded servers have in common: one process, its port, its folder, its end, and jars from Maven."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ET
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, TypeVar

from sqlalchemy.engine import make_url

from dualwrite.clock import Deadline
from dualwrite.errors import ConfigurationError, IllegalStateError, Unavailable
from dualwrite.interfaces import Closing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.engine import URL
    from typing_extensions import Self


POM = Path(__file__).with_name("pom.xml")
CACHE_VARIABLE = "DUALWRITE_CACHE"
KAFKA_VARIABLE = "DUALWRITE_KAFKA_VERSION"
_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+){1,3}(-[A-Za-z0-9.]+)?")


def cache_directory() -> Path:
    """The directory for fetched files: ``DUALWRITE_CACHE``, else ``dualwrite`` in the user's cache directory."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualwrite"


def java() -> str:
    """The ``java`` program: ``JAVA_HOME``'s, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    return _program(f"{home}/bin/java" if home else "java", "a Java runtime, 17 or newer (JAVA_HOME or PATH)")


def _program(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"the embedded servers need {what}: {name!r} was not found",
            next_step="install it, or name servers of your own by DUALWRITE_TEST_KAFKA, DUALWRITE_TEST_ZOOKEEPER and "
            "DUALWRITE_TEST_MARIADB",
        )
    return found


def kafka_jars(pom: Path = POM, version: str | None = None) -> Path:
    """The directory that holds the broker's jars; see :func:`fetched_jars`.

    The version is the given one, else that of ``DUALWRITE_KAFKA_VERSION``, else that of the `pom`.
    """
    return fetched_jars(pom, "kafka", "Apache Kafka", version=version or os.environ.get(KAFKA_VARIABLE))


def fetched_jars(
    pom: Path,
    prefix: str,
    what: str,
    unpack: Callable[[Path], None] | None = None,
    *,
    version: str | None = None,
) -> Path:
    """The directory with the jars that a ``pom.xml`` names; fetches them first if they are not in the cache.

    Several processes may ask at once: one fetches, the others wait. No process sees a half-fetched directory: `unpack` is
    called once, with the directory of the jars just fetched, before anybody else can see it. The cache has one directory for
    each content of `pom`, whose first dependency has the version of the product `what`, unless another `version` is given.
    """
    content = pom.read_bytes()
    own = ET.fromstring(content).findtext("{*}dependencies/{*}dependency/{*}version", "unknown")
    if version is None:
        version = own
    elif _VERSION.fullmatch(version) is None:
        raise ConfigurationError(f"{version!r} is not a version of {what}", next_step="write it as 4.4.0")
    content = content.replace(f"<version>{own}</version>".encode(), f"<version>{version}</version>".encode(), 1)
    cache = cache_directory()
    target = cache / f"{prefix}-{version}-{hashlib.sha256(content).hexdigest()[:12]}"
    if target.is_dir():
        return target
    java()
    maven = _program("mvn", "Apache Maven, once, to fetch its jars")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{target.name}.lock").open("w") as lock:
        _lock(lock.fileno(), target)
        if not target.is_dir():  # another process may have fetched them while we waited
            _fetch(maven, content, f"{what} {version}", target, unpack)
    return target


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say(f"waiting for another process to fetch {target.name}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _fetch(maven: str, pom: bytes, what: str, target: Path, unpack: Callable[[Path], None] | None) -> None:
    for stale in target.parent.glob(f"{target.name}.partial-*"):  # we hold the lock: its owner was killed
        shutil.rmtree(stale)
    _say(f"fetching {what} with Maven, once, into {target}")
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    (partial / "pom.xml").write_bytes(pom)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={partial}", "-DincludeScope=runtime"]
    command = [maven, "--batch-mode", "--file", str(partial / "pom.xml"), *goal]
    output: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        fetched = 0
        for line in process.stdout:
            output.append(line)
            if "Downloaded from" in line:
                fetched += 1
                if fetched % 20 == 0:
                    _say(f"  {fetched} files")
    if process.returncode != 0:
        shutil.rmtree(partial)
        raise Unavailable(
            f"Maven could not fetch {what}:\n{''.join(output[-20:])}",
            next_step="see Maven's own message above; it reads the user's Maven settings",
        )
    if unpack is not None:
        unpack(partial)
    partial.chmod(0o755)
    partial.rename(target)
    _say(f"fetched {what}")


def _say(text: str) -> None:
    sys.stderr.write(f"dualwrite: {text}\n")
    sys.stderr.flush()


# One server process that cannot outlive the test process.

WARDEN = Path(__file__).with_name("_warden.py")


class ServerProcess:
    """A directory, and at most one server process that runs in it.

    Both go away when this object is closed, and when this process dies in any way, SIGKILL included: a small separate process
    (``_warden.py``) ensures that. A stopped or killed server may be started again in the same directory.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix=f"dualwrite-{name}-"))
        self.log = self.directory / "server.log"
        self.pid: int | None = None
        self._owner = os.getpid()
        self._talking = threading.Lock()
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WARDEN), str(os.getpid()), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that closing the pipe has nothing left to write
            start_new_session=True,
        )

    def _ask(self, do: str, **request: object) -> dict[str, object]:
        if os.getpid() != self._owner:
            raise IllegalStateError(f"the embedded {self.name} belongs to the process that started it, not to a fork")
        warden_in, warden_out = self._warden.stdin, self._warden.stdout
        assert warden_in is not None
        assert warden_out is not None
        with self._talking:
            if warden_in.closed:
                raise IllegalStateError(f"the embedded {self.name} is closed")
            try:
                warden_in.write(json.dumps({"do": do, **request}).encode() + b"\n")
                line = warden_out.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            raise IllegalStateError(f"the process that holds the embedded {self.name} was killed")
        answer: dict[str, object] = json.loads(line)
        if "error" in answer:
            raise OSError(f"{self.name}: {answer['error']}")
        return answer

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        """Start the server, appending its output to ``log``. Only root can choose another `user` to run it as."""
        if self.running:
            raise IllegalStateError(f"the embedded {self.name} is already running")
        answer = self._ask(
            "start",
            argv=list(argv),
            log=str(self.log),
            cwd=str(self.directory),
            env=dict(os.environ if env is None else env),
            user=user,
        )
        assert isinstance(answer["pid"], int)
        self.pid = answer["pid"]

    @property
    def running(self) -> bool:
        """Whether the server process exists (a suspended one does)."""
        return self.exit_code(0.0) is None and self.pid is not None

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait for the server's exit. Returns its exit code, or None if it still runs (or never did).

        On Linux, everything that the server had started has ended too when this returns a number.
        """
        deadline = Deadline(timeout_s)
        while True:
            # Wait in slices, so that another thread can send a signal in between.
            answer = self._ask("wait", seconds=min(0.1, deadline.remaining_s()))
            if not answer["running"]:
                self.pid = None
                code = answer["exit"]
                assert code is None or isinstance(code, int)
                return code
            if deadline.expired:
                return None

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        if not self._ask("signal", number=int(number))["sent"]:
            raise IllegalStateError(f"the embedded {self.name} is not running")

    def kill(self) -> None:
        """SIGKILL the server, and return when it is gone."""
        self.signal(signal.SIGKILL)
        self.exit_code(30.0)

    def log_tail(self, lines: int = 50) -> str:
        """The last lines that the server wrote."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Kill the server if it runs, and delete the directory. Idempotent."""
        if os.getpid() != self._owner:
            return
        with self._talking:
            assert self._warden.stdin is not None
            assert self._warden.stdout is not None
            self._warden.stdin.close()
            self._warden.wait()
            self._warden.stdout.close()
        if self.directory.exists():  # the warden was killed before it could delete it
            shutil.rmtree(self.directory)
        self.pid = None


class Embedded(Closing):
    """A server that runs as long as a ``with`` block."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and return when it answers."""

    @abstractmethod
    def close(self) -> None:
        """Kill it if it runs, and delete its directory. Idempotent."""

    def __enter__(self) -> Self:
        self.start()
        return self


class EmbeddedDatabase(Embedded):
    """One database server on a free port of the loopback interface.

    Args:
        settings: Server settings to add or to override.
        start_timeout_s: Seconds that a start may take.
    """

    # Its name in errors; in lower case, in the name of its directory.
    _SOFTWARE: ClassVar[str]
    # The environment variable that may hold the URL of a server to use instead.
    _VARIABLE: ClassVar[str]
    # The port of a URL that names none.
    _DEFAULT_PORT: ClassVar[int]

    def __init__(self, settings: Mapping[str, str] | None = None, *, start_timeout_s: float = 180.0) -> None:
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        external = None if self._settings else os.environ.get(self._VARIABLE) or None
        self._external = None if external is None else make_url(external)
        self._process: ServerProcess | None = None
        self._port: ReservedPort | None = None
        self._password = secrets.token_hex(16)

    @abstractmethod
    def _initialise(self, process: ServerProcess) -> None:
        """Create the data directory."""

    @abstractmethod
    def _launch(self, process: ServerProcess) -> None:
        """Start the server on its data directory."""

    @abstractmethod
    def _answers(self, deadline: Deadline) -> bool:
        """Whether a client can log in."""

    @abstractmethod
    def _location(self, database: str | None) -> URL:
        """The URL of a database on this server; of the server itself if None."""

    def __repr__(self) -> str:
        where = self._external or (f"{LOOPBACK}:{self._port.number}" if self._port else "not started")
        return f"{type(self).__name__}({where})"

    @property
    def port(self) -> int:
        """The TCP port, the same after `restart`.

        Raises:
            IllegalStateError: Never started.
        """
        if self._external is not None:
            return self._external.port or self._DEFAULT_PORT
        if self._port is None:
            raise IllegalStateError(f"the embedded {self._SOFTWARE} was never started, or is closed")
        return self._port.number

    def url_of(self, database: str) -> str:
        """The SQLAlchemy URL of a database on this server, password included."""
        return self._location(database).render_as_string(hide_password=False)

    @property
    def running(self) -> bool:
        """Whether the server's process exists (a suspended one does); True for a server from the environment."""
        return self._external is not None or (self._process is not None and self._process.running)

    def start(self) -> None:
        """Start the server, the first time with a new port and an empty directory, and return when it answers.

        After a `kill` it returns once crash recovery is done.

        Raises:
            IllegalStateError: It is running.
            ConfigurationError: The server is not installed, or refuses its settings.
            Unavailable: It was not ready in time.
        """
        if self._external is not None:
            return
        if self._process is not None:
            self._run(self._process)
            return
        self._process = ServerProcess(self._SOFTWARE.lower())
        self._port = ReservedPort()
        try:
            self._initialise(self._process)
            self._run(self._process)
        except BaseException:
            self.close()
            raise

    def _run(self, process: ServerProcess) -> None:
        deadline = Deadline(self._start_timeout_s)
        self._launch(process)
        limit = f"in {self._start_timeout_s} s"
        wait_until_ready(
            process, self._SOFTWARE, lambda: self._answers(deadline), deadline, limit=limit, look_every_s=0.02
        )

    def _make_data(self, process: ServerProcess, argv: Sequence[str], *, user: str | None = None) -> None:
        """Run the program that creates the data directory."""
        process.start(argv, user=user)
        code = process.exit_code(self._start_timeout_s)
        if code != 0:
            raise ConfigurationError(f"{Path(argv[0]).name} ended with {code}:\n{process.log_tail()}")

    def _own(self, deed: str) -> ServerProcess:
        if self._external is not None:
            raise IllegalStateError(
                f"cannot {deed} the {self._SOFTWARE} server named by {self._VARIABLE}",
                next_step=f"unset {self._VARIABLE} to run this with an embedded server",
            )
        if self._process is None:
            raise IllegalStateError(f"cannot {deed} a {self._SOFTWARE} server that was never started")
        return self._process

    def kill(self) -> None:
        """SIGKILL the server and (on Linux) its child processes, and return when they are gone. The data stays.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        self._own("kill").kill()

    def close(self) -> None:
        """Kill the server if it runs, delete its directory, release its port. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._port is not None:
            self._port.release()
            self._port = None

    def log_tail(self, lines: int = 50) -> str:
        """The last lines of the server's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._own("read the log of").log_tail(lines)


class Member(Protocol):
    """One server of a cluster."""

    process: ServerProcess

    @property
    def address(self) -> str:
        """Where clients connect, as ``host:port``."""
        ...

    def close(self) -> None:
        """Kill it if it runs, delete its directory, release its ports."""
        ...


MemberT = TypeVar("MemberT", bound=Member)


class EmbeddedCluster(Embedded, Generic[MemberT]):
    """The servers of one cluster, on free ports of the loopback interface; their ids count from 1.

    Args:
        special: Whether only servers of our own will do, whatever the environment names.
        start_timeout_s: Seconds that a start may take.
    """

    # Its name in errors.
    _SOFTWARE: ClassVar[str]
    # The environment variable that may hold the addresses of servers to use instead.
    _VARIABLE: ClassVar[str]
    # The word of errors for all servers together.
    _CLUSTER: ClassVar[str]
    # The word of errors for one server.
    _MEMBER: ClassVar[str]

    def __init__(self, *, special: bool, start_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._external = None if special else os.environ.get(self._VARIABLE) or None
        self._members: list[MemberT] = []

    def __repr__(self) -> str:
        where = self._addresses() if self._external or self._members else "not started"
        return f"{type(self).__name__}({where})"

    def _addresses(self) -> str:
        return self._external or ",".join(one.address for one in self._chosen(None, "connect to"))

    @property
    def running(self) -> bool:
        """Whether all servers' processes exist (a suspended one does); True for servers from the environment."""
        return self._external is not None or (bool(self._members) and all(one.process.running for one in self._members))

    def _chosen(self, number: int | None, deed: str) -> list[MemberT]:
        """One server, or all of them."""
        if self._external is not None:
            raise IllegalStateError(
                f"cannot {deed} the {self._SOFTWARE} servers named by {self._VARIABLE}: this {self._CLUSTER} is not ours",
                next_step=f"unset {self._VARIABLE} to run this with an embedded {self._MEMBER}",
            )
        if not self._members:
            raise IllegalStateError(
                f"cannot {deed} a {self._SOFTWARE} {self._MEMBER} that was never started, or is closed"
            )
        if number is None:
            return self._members
        if not 1 <= number <= len(self._members):
            raise IllegalStateError(f"there is no {self._MEMBER} {number}: their ids are 1 to {len(self._members)}")
        return [self._members[number - 1]]

    def _running(self, number: int | None, deed: str) -> list[MemberT]:
        chosen = self._chosen(number, deed)
        # If none runs, the first one raises the error.
        return [one for one in chosen if one.process.running] or chosen

    def _stopped(self, number: int | None) -> list[MemberT]:
        chosen = self._chosen(number, "start")
        # If all run, the first one raises the error.
        return [one for one in chosen if not one.process.running] or chosen

    @abstractmethod
    def start(self, server: int | None = None) -> None:
        """Start the servers that do not run, or only the one with this id, and return when they answer."""

    def stop(self, timeout_s: float = 180.0, *, server: int | None = None) -> None:
        """Stop the servers as an operator would (SIGTERM). `start` finds their data again.

        Args:
            timeout_s: Seconds that each may take.
            server: The id of the only server to stop; if None, all that run. Without a quorum, the last of several Kafka
                controllers cannot shut down cleanly, so prefer `kill` for a whole cluster.

        Raises:
            IllegalStateError: It is not running, or not ours.
            Unavailable: It still runs.
        """
        for one in self._running(server, "stop"):
            stop_process(one.process, self._SOFTWARE, timeout_s)

    def kill(self, server: int | None = None) -> None:
        """SIGKILL the servers, and return when they are gone. `start` finds the data that they had written.

        Args:
            server: The id of the only server to kill; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "kill"):
            one.process.kill()

    def restart(self, server: int | None = None) -> None:
        """`stop` the running servers, then `start` them: same ports, same data.

        Args:
            server: The id of the only server; all if None.
        """
        if any(one.process.running for one in self._chosen(server, "restart")):
            self.stop(server=server)
        self.start(server)

    def suspend(self, server: int | None = None) -> None:
        """SIGSTOP: until `resume` the servers do not answer, and their connections stay open.

        Args:
            server: The id of the only server to suspend; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "suspend"):
            one.process.signal(signal.SIGSTOP)

    def resume(self, server: int | None = None) -> None:
        """SIGCONT after `suspend`.

        Args:
            server: The id of the only server; if None, all that run.

        Raises:
            IllegalStateError: It is not running, or not ours.
        """
        for one in self._running(server, "resume"):
            one.process.signal(signal.SIGCONT)

    def log_tail(self, lines: int = 50, *, server: int = 1) -> str:
        """The last lines of a server's log.

        Raises:
            IllegalStateError: Never started, or not ours.
        """
        return self._chosen(server, "read the log of")[0].process.log_tail(lines)

    def close(self) -> None:
        """Kill the running servers, delete their directories, release their ports. Idempotent."""
        while self._members:
            self._members.pop().close()


def wait_until_ready(
    process: ServerProcess,
    who: str,
    ready: Callable[[], object],
    deadline: Deadline,
    *,
    limit: str = "in time",
    look_every_s: float = 0.05,
) -> None:
    """Wait for a server that is starting. `ready` is called at least once.

    `ConfigurationError` means that it exited, `Unavailable` that it took too long; `limit` names the deadline in that error.
    """
    while not ready():
        code = process.exit_code(look_every_s)
        if code is not None:
            raise ConfigurationError(f"{who} ended with {code} while it started:\n{process.log_tail()}")
        if deadline.expired:
            raise Unavailable(f"{who} was not ready {limit}:\n{process.log_tail()}")


def stop_process(
    process: ServerProcess, who: str, timeout_s: float, how: str = "SIGTERM", *, by: signal.Signals = signal.SIGTERM
) -> None:
    """Stop a server by a signal, even if it is suspended."""
    process.signal(signal.SIGCONT)
    process.signal(by)
    if process.exit_code(timeout_s) is None:
        raise Unavailable(f"{who} still runs {timeout_s} s after {how}:\n{process.log_tail()}")


# TCP ports on the loopback interface, reserved while we hold them.

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A free port that stays ours, even while the server that listens on it is killed and restarted.

    On Linux a bound socket that does not listen keeps the kernel from giving the port to a process that asks for any
    free one, yet a server may listen on it by number (with SO_REUSEADDR, as servers do). Other systems would refuse
    that server, so there the port is not held: it was free a moment ago.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.number: int = self._socket.getsockname()[1]
        if not sys.platform.startswith("linux"):
            self._socket.close()

    def release(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def accepts_connections(port: int) -> bool:
    """Whether a server listens on this port of the loopback interface."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0):
            return True
    except OSError:
        return False
