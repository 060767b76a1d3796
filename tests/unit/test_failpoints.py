"""What an armed fail point does to its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import wait_until

_STOPS_IN_A_THREAD = """
import os, sys, threading
from dualwrite import failpoints

def passes():
    failpoints.hit("write.checked")
    print("went on", flush=True)

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
thread = threading.Thread(target=passes)
failpoints.arm("write.checked:1:stop")
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux lets a thread wait for idle processors")
def test_a_thread_that_stops_its_process_does_not_go_on_before_the_process_has_stopped():
    """The kernel gives a process's signals to its main thread first, which may have to wait for a processor."""
    with subprocess.Popen([sys.executable, "-c", _STOPS_IN_A_THREAD], stdout=subprocess.PIPE, text=True) as process:
        try:
            state = Path(f"/proc/{process.pid}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] in {"T", "Z"}, pause_s=0.02)
        finally:
            process.kill()
        assert process.communicate()[0] == ""
