"""One server process that cannot outlive the test process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dualwrite.clock import Deadline
from dualwrite.errors import IllegalStateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WARDEN = Path(__file__).with_name("_warden.py")


class ServerProcess:
    """A directory, and at most one server process that runs in it.

    Both go away when this object is closed, and when this process dies in any way, SIGKILL included: a small separate
    process (``_warden.py``) ensures that. A stopped or killed server may be started again in the same directory.

    Args:
        name: Names the server in errors and in the temporary directory's name.
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
        """Start the server, appending its output to ``log``.

        Args:
            argv: Program and arguments.
            env: Environment; this process's own if not given.
            user: Operating system user to run as; only root can choose one.

        Raises:
            IllegalStateError: It is running already.
            OSError: The program could not be started.
        """
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
        """Send the server a signal.

        Raises:
            IllegalStateError: No server runs.
        """
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
