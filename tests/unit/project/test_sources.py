"""The page about the sources names what there is."""

import importlib
import re

import pytest
from click.testing import CliRunner
from harness.places import ROOT

from dualwrite.cli.options import commands
from dualwrite.telemetry import names

PAGE = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
STATUS = {"implemented", "done otherwise", "left out", "not implemented yet"}
METRICS = {metric.name for metric in names.METRICS}


def exists(name):
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("name", [one for one in NAMED if re.fullmatch(r"dualwrite(\.\w+)+", one)])
def test_every_name_of_the_library_exists(name):
    assert name in METRICS or exists(name)


@pytest.mark.parametrize("path", [one for one in NAMED if re.match(r"(tests|examples|docs|benchmarks)/", one)])
def test_every_file_exists(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("command", [one for one in NAMED if one.startswith("dualwrite ")])
def test_every_command_and_its_options_exist(command):
    name, *arguments = command.split()[1:]
    shown = CliRunner().invoke(commands, [name, "--help"]).output
    assert f" {name} [OPTIONS]" in shown
    assert [one for one in arguments if one.startswith("--") and one not in shown] == []


def test_every_section_has_a_status_and_all_but_the_missing_ones_a_place_or_a_reason():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith("| Section")
    ]
    assert len(rows) > 70
    for section, status, why in rows:
        assert status in STATUS, section
        assert why or status == "not implemented yet", section
