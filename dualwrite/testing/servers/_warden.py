"""A small process that holds one embedded server, and outlives the test process by at most half a second.

A test process can be killed at any instant, even by SIGKILL, and then runs no clean-up. So each embedded server is a
child of this script, which notices that its own parent is gone, kills the server with everything that the server
started, and deletes the server's directory. ``PR_SET_PDEATHSIG`` alone would not suffice: it follows the *thread* that
made the child, reaches no grandchildren, and deletes no files.

It runs as a file, isolated (``python -I -S``), so it imports only the standard library. It reads one JSON object per
line and answers each with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# The longest time that a dead parent goes unnoticed while a fork of it still holds our standard input open.
PARENT_POLL_S = 0.5


def _prctl() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, value: int(function(option, value, 0, 0, 0))


PRCTL = _prctl()


def _die_with_warden() -> None:
    # Runs between fork and exec, after the change of user, which would clear the setting. This process has one
    # thread, so preexec_fn is safe here.
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


class Warden:
    """The server, if one runs, and its directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.server: subprocess.Popen[bytes] | None = None

    def start(self, request: dict[str, object]) -> dict[str, object]:
        """Start the server, its output appended to the request's log file."""
        argv, env = request["argv"], request["env"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        user = request["user"]
        assert user is None or isinstance(user, str)
        with Path(str(request["log"])).open("ab") as log:
            self.server = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=str(request["cwd"]),
                env=env,
                user=user,
                group=None if user is None else _group_of(user),
                extra_groups=None if user is None else [],
                start_new_session=True,
                preexec_fn=_die_with_warden,  # noqa: PLW1509 - there is one thread here
            )
        return {"pid": self.server.pid}

    def signal(self, request: dict[str, object]) -> dict[str, object]:
        """Send the server a signal, unless it has exited. After SIGSTOP, it has stopped on return."""
        number = request["number"]
        assert isinstance(number, int)
        if self.server is None or self.server.poll() is not None:
            return {"sent": False}
        self.server.send_signal(number)
        if number == signal.SIGSTOP and hasattr(os, "waitid"):  # not on every macOS
            # A thread on another CPU may answer a request or two before it stops.
            os.waitid(os.P_PID, self.server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return {"sent": True}

    def wait(self, request: dict[str, object]) -> dict[str, object]:
        """Wait for the server's exit, then kill everything that it had started."""
        seconds = request["seconds"]
        assert isinstance(seconds, float)
        if self.server is None:
            return {"exit": None, "running": False}
        try:
            code = self.server.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"exit": None, "running": True}
        kill_orphans()
        return {"exit": code, "running": False}

    def clean_up(self) -> None:
        """Kill everything that still runs, and delete the directory."""
        if self.server is not None and self.server.poll() is None:
            self.server.kill()
            self.server.wait()
        kill_orphans()
        shutil.rmtree(self.directory)


def _group_of(user: str) -> int:
    import pwd  # noqa: PLC0415 - absent on Windows, and needed only as root

    return pwd.getpwnam(user).pw_gid


def _children() -> Iterator[int]:
    own = str(os.getpid())
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it exited while we looked
                # pid (name, which may hold spaces and brackets) state ppid ...
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if stat.rpartition(")")[2].split()[1] == own:
                    yield int(entry.name)


def kill_orphans() -> None:
    """Kill and reap processes that a dead server left running: on Linux they have become our children."""
    if PRCTL is None:
        return
    while children := list(_children()):
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def requests(parent: int) -> Iterator[dict[str, object]]:
    """The requests of the parent, until it closes our standard input or dies."""
    pending = b""
    while True:
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            yield json.loads(line)
        readable, _, _ = select.select([0], [], [], PARENT_POLL_S)
        if readable:
            data = os.read(0, 65536)
            if not data:
                return
            pending += data
        elif os.getppid() != parent:
            return


def main() -> None:
    """Serve the parent named in the arguments, then clean up."""
    parent, directory = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if PRCTL is not None:
        PRCTL(PR_SET_CHILD_SUBREAPER, 1)
    warden = Warden(directory)
    actions = {"start": warden.start, "signal": warden.signal, "wait": warden.wait}
    try:
        for request in requests(parent):
            try:
                answer = actions[str(request["do"])](request)
            except OSError as error:
                answer = {"error": str(error)}
            try:
                os.write(1, json.dumps(answer).encode() + b"\n")
            except BrokenPipeError:  # the parent died while it waited for this answer
                return
    finally:
        warden.clean_up()


if __name__ == "__main__":
    main()
