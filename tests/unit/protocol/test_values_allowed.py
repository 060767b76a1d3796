"""The rules for durations, ids and prefixes; calls and commands keep them before they connect."""

import math
from datetime import datetime, timedelta, timezone

import pytest
from click.testing import CliRunner

from dualwrite import ConfigurationError, DualWriter, PreparedTxnState, WriterLimits, recover, status
from dualwrite.cli.options import commands
from dualwrite.operations import blocking_transactions, forget, terminate
from dualwrite.protocol.values import LONGEST_S, check_not_empty, check_seconds, check_selection, check_writer_name
from dualwrite.recovery.operator import complete_prepared

NOWHERE = {"kafka": {"bootstrap.servers": "127.0.0.1:1"}, "database": "postgresql+psycopg://127.0.0.1:1/nowhere"}
NO_TIMES = [math.nan, math.inf, -math.inf, -0.001, 1e308]


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_what_is_no_time_is_refused(seconds):
    for zero in (True, False):
        with pytest.raises(ConfigurationError, match=r"wait_s is .* s .*give "):
            check_seconds("wait_s", seconds, zero=zero)


def test_zero_is_a_time_only_where_it_may_be():
    check_seconds("wait_s", 0, zero=True)
    with pytest.raises(ConfigurationError, match="more than 0"):
        check_seconds("wait_s", 0)


def test_the_longest_time_can_be_taken_from_the_present():
    check_seconds("wait_s", LONGEST_S)
    assert datetime.now(timezone.utc) - timedelta(seconds=LONGEST_S)


def test_a_selection_is_an_id_or_a_prefix_or_neither():
    for given in ((None, None), ("orders", None), (None, "ord")):
        check_selection(*given)
    with pytest.raises(TypeError, match="cannot be combined"):
        check_selection("orders", "ord")
    with pytest.raises(ConfigurationError, match="the transactional id is empty"):
        check_selection("", None)
    with pytest.raises(ConfigurationError, match=r"the prefix is empty .*--all"):
        check_selection(None, "")
    with pytest.raises(ConfigurationError, match="the name is empty"):
        check_not_empty("the name", "")


def test_names_that_leave_room_for_the_number_of_a_lane_are_taken():
    for name in ("o", "o" * 240):
        check_writer_name(name)


@pytest.mark.parametrize(
    ("name", "said"), [("", "transactional id"), ("o" * 241, "transactional id"), ("orders#1", "'#'")]
)
def test_names_that_cannot_work_are_refused(name, said):
    with pytest.raises(ConfigurationError, match=said):
        check_writer_name(name)


@pytest.mark.parametrize("wrong", [{"max_lanes": 0}, {"group_units": 0}, {"group_bytes": -1}, {"waiting_units": 0}])
def test_counts_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=f"{next(iter(wrong))} is .*at least"):
        WriterLimits(**wrong)


WITH_TIMES = [
    (lambda **given: forget(**NOWHERE, **given), ["untouched_for_s", "timeout_s"]),
    (lambda **given: recover(**NOWHERE, **given), ["open_for_s", "timeout_s"]),
    (lambda **given: status(**NOWHERE, **given), ["timeout_s"]),
    (lambda **given: terminate("orders", **NOWHERE, **given), ["timeout_s"]),
    (lambda **given: blocking_transactions(NOWHERE["kafka"], **given), ["open_for_s", "timeout_s"]),
    (lambda **given: complete_prepared("a", PreparedTxnState(), kafka=NOWHERE["kafka"], **given), ["timeout_s"]),
    (
        WriterLimits,
        ["timeout_s", "lane_timeout_s", "margin_s", "idle_after_s", "paused_owner_timeout_s", "group_open_s"],
    ),
    (lambda **given: DualWriter.leased("orders", **NOWHERE, **given), ["lease_timeout_s", "heartbeat_s"]),
]


@pytest.mark.parametrize(
    ("call", "name"),
    [pytest.param(call, name, id=f"{n}-{name}") for n, (call, names) in enumerate(WITH_TIMES) for name in names],
)
@pytest.mark.parametrize("seconds", NO_TIMES)
def test_no_call_takes_what_is_no_time(call, name, seconds):
    with pytest.raises(ConfigurationError, match=rf"^(orders: )?{name} is "):
        call(**{name: seconds})


@pytest.mark.parametrize("call", [forget, recover, status])
def test_no_call_takes_an_empty_id_or_prefix_for_every_id(call):
    with pytest.raises(ConfigurationError, match="the prefix is empty"):
        call(**NOWHERE, prefix="")
    with pytest.raises(ConfigurationError, match="the transactional id is empty"):
        call("", **NOWHERE)
    with pytest.raises(TypeError, match="cannot be combined"):
        call("orders", **NOWHERE, prefix="ord")


def test_terminate_takes_no_empty_id():
    with pytest.raises(ConfigurationError, match="is empty"):
        terminate("", **NOWHERE)


SERVERS = ["--url", NOWHERE["database"], "--bootstrap-server", "127.0.0.1:1"]


@pytest.mark.parametrize(
    "words",
    [
        *(["forget", "--all", "--untouched-for", days] for days in ("nan", "inf", "-1", "1e308", "40000")),
        *(["recover", "--all", "--open-for", seconds] for seconds in ("nan", "inf", "-1")),
        *(["status", "--open-for", seconds] for seconds in ("nan", "inf", "-1")),
        *(
            [*command, "--timeout", seconds]
            for command in (["status"], ["recover", "--all"], ["forget", "--all"], ["terminate", "a"])
            for seconds in ("nan", "inf", "0", "-5", "soon")
        ),
        ["forget", ""],
        ["forget", "--prefix", ""],
        ["recover", ""],
        ["recover", "--prefix", ""],
        ["status", ""],
        ["status", "--prefix", ""],
        ["status", "a", "--prefix", "b"],
        ["terminate", ""],
    ],
    ids=" ".join,
)
def test_commands_refuse_them_as_wrong_usage(words):
    done = CliRunner().invoke(commands, [*words, *SERVERS])
    assert done.exit_code == 2, (done.output, done.exception)
    assert "Error: " in done.output


def test_migrate_refuses_an_empty_revision_as_wrong_usage():
    done = CliRunner().invoke(commands, ["migrate", "--url", NOWHERE["database"], "--revision", ""])
    assert done.exit_code == 2
    assert "is empty" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["acknowledge", "", "--all", *SERVERS[:2]],
        ["acknowledge", "orders", "", *SERVERS[:2]],
        ["batches", "", *SERVERS[:2]],
        ["migrate", "--url", ""],
        ["migrate", "--schema", "", *SERVERS[:2]],
    ],
    ids=" ".join,
)
def test_commands_of_the_database_alone_refuse_empty_names_as_wrong_usage(words):
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 2, (done.output, done.exception)
    assert "is empty" in done.output
