"""The unit tests mirror the packages: each module of the core has tests of its name, so that a reader finds them."""

from harness.places import ROOT

CORE = ("protocol", "recovery", "writing")
TABLES = (
    "test_machine runs every table of a life over its whole matrix, and compares the diagrams with the documented ones"
)
ELSEWHERE = {
    **{
        f"protocol/tables/{name}": TABLES for name in ("batch_life", "lane_life", "lease_life", "write_life", "diagram")
    },
    "protocol/producer_record": "unit/writing/group/test_row_unit",
    "writing/opened": "test_writer",
}


def modules(folder, prefix=""):
    """The names of the modules below a folder that begin with the prefix, without it."""
    for path in folder.rglob("*.py"):
        if path.stem.startswith(prefix) and path.stem != "__init__":
            yield path.with_name(path.name.removeprefix(prefix)).relative_to(folder).with_suffix("").as_posix()


def test_every_module_of_the_core_has_tests_of_its_name():
    for package in CORE:
        tested = {f"{package}/{name}" for name in modules(ROOT / "tests" / "unit" / package, "test_")}
        there = {f"{package}/{name}" for name in modules(ROOT / "dualwrite" / package)}
        assert there, package
        assert tested == there - ELSEWHERE.keys()
