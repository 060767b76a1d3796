"""How much Python one dual write runs: functions are counted, not timed, so a busy machine changes nothing."""

import socket
import sys
import threading

import pytest
from sqlalchemy import create_engine

from benchmarks import calls
from dualwrite import DualWriter

# The calls of one steady dual write, one message and one row, by the caller's thread, and 2 % more. A change that makes fewer
# calls lowers these; one that must raise them says why in its commit. Those of the background come once a second, so a slow
# machine has more of them for each write: they have a bound of their own. So has a sender, which takes the fewer the more writes
# it finds: it alone makes most of them.
MOST = {"never": (304, 637, 100), "always": (219, 566, 700)}
# A busy machine cuts waits into parts, and lets the caller ask again how a transaction has ended: both are more calls. Of many
# short runs, one is spared; what each write calls is in all of them.
WRITES, RUNS = 25, 12


@pytest.mark.parametrize("outbox", MOST)
def test_a_steady_dual_write_calls_no_more_functions_than_it_did(
    dualwrite_kafka, dualwrite_topic, migrated_database, outbox
):
    most_own, most_python, most_in_the_background = MOST[outbox]
    servers = (dualwrite_kafka.client_config(), migrated_database, dualwrite_topic)
    found = calls.in_new_process(calls.count, *servers, WRITES, 100, RUNS, outbox)
    most = "\n".join(f"{times:7.1f}  {name}" for name, times in list(found.functions.items())[:30])
    assert found.own - found.own_background <= most_own, most
    assert found.python - found.background <= most_python, most
    assert found.background <= most_in_the_background, most
    assert found.packages["psycopg"] > 40  # else nothing was counted, or another driver


def test_a_message_comes_from_produce_to_the_socket_in_seven_frames(
    dualwrite_kafka, dualwrite_topic, migrated_database
):
    found = []

    def look(frame, event, function):
        if event == "c_call" and isinstance(getattr(function, "__self__", None), socket.socket):
            found.append([])
            while frame.f_code.co_name != look.caller:
                found[-1].append(frame.f_code.co_name)
                frame = frame.f_back

    look.caller = sys._getframe().f_code.co_name
    engine = create_engine(migrated_database)
    with DualWriter(
        "frames", kafka={**dualwrite_kafka.client_config(), "dualwrite.engine": "native"}, database=engine
    ) as writer:
        for _ in range(5):  # the first ones connect, and look the topic up
            found.clear()
            with writer.transaction() as tx:
                sys.setprofile(look)
                tx.produce(dualwrite_topic, value="x")
                sys.setprofile(None)
    engine.dispose()
    [frames] = found
    assert frames[-1] == "produce"
    assert len(frames) <= 7, frames


def test_calls_are_counted_in_threads_that_start_meanwhile_and_in_no_others():
    asked, answered = threading.Event(), threading.Event()

    def answer():
        asked.wait()
        answered.set()

    with calls.Counting() as counting:
        thread = threading.Thread(target=answer)
        thread.start()

        def ask():
            asked.set()
            answered.wait()

        found = counting.of(ask, 1)
        thread.join()
    assert found.background > 0
    assert found.python > found.background
    assert found.packages.keys() == {calls.STANDARD}
    assert found.own == 0
