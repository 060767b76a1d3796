"""The processor time that tests have used, as it is shown."""

from harness.spent import COLLECTING, TOTAL, shown


def test_the_files_and_tests_that_take_most_come_first():
    text = shown({TOTAL: 100.0, COLLECTING: 9.0, "a.py::one": 1.0, "b.py::two": 5.0, "a.py::three": 6.0})
    assert text.splitlines() == [
        "100 s of the processor: 12 in 3 tests, 9 in collecting.",
        "    7.0 s      2 tests  a.py",
        "    5.0 s      1 tests  b.py",
        "",
        "    6.0 s  a.py::three",
        "    5.0 s  b.py::two",
        "    1.0 s  a.py::one",
    ]
