"""The processor time that tests have used, as it is shown."""

from harness.spent import COLLECTING, SERVER, STARTS, TOTAL, shown


def test_the_servers_files_and_tests_that_take_most_come_first():
    servers = {SERVER + "kafka": 8.0, STARTS + "kafka": 1, SERVER + "postgres": 9.0, STARTS + "postgres": 3}
    tests = {"a.py::one": 1.0, "b.py::two": 5.0, "a.py::three": 6.0}
    assert shown({TOTAL: 100.0, COLLECTING: 9.0, **servers, **tests}).splitlines() == [
        "100 s of the processor: 12 in 3 tests, 17 in servers that lasted, 9 in collecting.",
        "    9.0 s      3 starts  postgres",
        "    8.0 s      1 starts  kafka",
        "",
        "    7.0 s      2 tests  a.py",
        "    5.0 s      1 tests  b.py",
        "",
        "    6.0 s  a.py::three",
        "    5.0 s  b.py::two",
        "    1.0 s  a.py::one",
    ]
