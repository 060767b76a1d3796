"""Findings, and the rules for clocks, clients and the process: each row plants one fact, and names what must be found."""

import pytest

from dualwrite.errors import ConfigurationError, Unavailable
from dualwrite.protocol.findings import (
    Check,
    CheckResult,
    Status,
    Unasked,
    client,
    clock,
    descriptors,
    forked,
    librdkafka,
    listed,
    numbers_of,
    worst,
)

OK, UNKNOWN, WARNING, ERROR = Status.OK, Status.UNKNOWN, Status.WARNING, Status.ERROR


def finding(status):
    return CheckResult("area", "check", status, "found", "why")


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([], OK),
        ([OK, OK], OK),
        ([OK, UNKNOWN], UNKNOWN),
        ([WARNING, UNKNOWN, OK], WARNING),
        ([OK, ERROR, WARNING], ERROR),
    ],
)
def test_the_worst_status_is_that_of_all(seen, found):
    assert worst([finding(status) for status in seen]) is found


def test_a_finding_is_the_error_with_which_start_up_refuses_the_same():
    error = Check("database", "fsync", "it is lost").error("fsync is off", "switch it on").as_error()
    assert isinstance(error, ConfigurationError)
    assert str(error) == "fsync is off: it is lost (switch it on)"


def test_a_finding_that_an_error_of_the_library_tells_keeps_its_advice():
    found = Check("Kafka", "brokers", "why").refused(Unavailable("nobody answers", next_step="start them"))
    assert (found.status, found.found, found.remedy) == (ERROR, "nobody answers", "start them")


def test_what_could_not_be_asked_for_is_unknown_with_its_reason():
    found = Check("Kafka", "brokers", "why").unknown(Unasked("no right", "grant it"))
    assert (found.status, found.found, found.remedy) == (UNKNOWN, "no right", "grant it")


@pytest.mark.parametrize(
    ("names", "text"),
    [([], ""), (["a"], "a"), (list("abcde"), "a, b, c, d, e"), (list("abcdefg"), "a, b, c, d, e, and 2 more")],
)
def test_a_list_for_people_is_short(names, text):
    assert listed(names) == text


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "of_brokers", "status"),
    [
        (0.0, 0.0, False, OK),
        (5.0, 0.0, False, OK),
        (5.1, 0.0, False, WARNING),
        (-5.1, 0.0, False, WARNING),
        (6.0, 2.0, False, OK),  # it may be less than it seems: the answer took four seconds
        (7200.0, 0.0, False, WARNING),
        (3700.0, 0.0, True, ERROR),
        (-7200.0, 0.0, True, WARNING),  # messages from the past are taken
        (-90_000.0, 0.0, True, ERROR),  # and deleted by their age
        (3700.0, 200.0, True, WARNING),
        (Unasked("no right"), 0.0, True, UNKNOWN),
    ],
)
def test_clocks_that_are_apart_are_found(ahead_s, within_s, of_brokers, status):
    assert clock("the database", ahead_s, within_s, of_brokers=of_brokers).status is status


@pytest.mark.parametrize(
    ("version", "required", "status"),
    [
        ("2.16.1", "<2.17,>=2.16", OK),
        ("2.16", ">=2.16.0", OK),
        ("2.15.9", "<2.17,>=2.16", ERROR),
        ("2.17.0", "<2.17,>=2.16", WARNING),
        ("2.17.0rc1", "<2.17", WARNING),
        ("3.2", ">=3.2", OK),
        ("3.10.0", ">=3.2", OK),
        ("9.9", "", OK),
        (None, ">=3.2", ERROR),
    ],
)
def test_a_client_outside_the_tested_range_is_found(version, required, status):
    assert client("confluent-kafka", version, required).status is status


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.16.0", (2, 16)), ("10.20.30", (10, 20, 30)), ("2.1rc3", (2, 1)), ("", ())]
)
def test_versions_compare_as_numbers(version, numbers):
    assert numbers_of(version) == numbers


@pytest.mark.parametrize(
    ("version", "confluent", "status"),
    [("2.16.0", "2.16.1", OK), ("2.15.0", "2.16.1", WARNING), ("3.16", "2.16", WARNING)],
)
def test_librdkafka_of_another_release_is_found(version, confluent, status):
    assert librdkafka(version, confluent).status is status


@pytest.mark.parametrize(("was_forked", "inherited", "status"), [(False, 0, OK), (True, 0, OK), (True, 1, ERROR)])
def test_a_writer_that_came_through_a_fork_is_found(was_forked, inherited, status):
    assert forked(was_forked=was_forked, inherited=inherited).status is status


@pytest.mark.parametrize(
    ("used", "limit", "status"),
    [(10, 1024, OK), (800, 1024, OK), (900, 1024, WARNING), (900, None, OK), (Unasked("Windows"), 10, UNKNOWN)],
)
def test_few_file_descriptors_are_found(used, limit, status):
    assert descriptors(used, limit).status is status
