"""The quickstart runs as it stands, from an empty directory, with the servers that it starts itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import class_archive
from harness.patience import PATIENCE_S
from harness.places import ROOT

NEXT = "--- next ---"


def blocks():
    """The page's code in order: its language and its text."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return re.findall(r"^```(console|python)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def steps():
    """Each command of the page, in order, with the output that the page shows."""
    for language, shown in blocks():
        if language == "console":
            for step in re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]:
                command, _, output = step.partition("\n")
                yield command, output.strip()


def reader(place, script):
    """A reader's shell in that directory: what it prints, and its exit code."""
    tools = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",  # what the page installs is installed here, the library from this tree
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        ["bash", "-ec", script],
        cwd=place,
        env={**os.environ, **class_archive.environment(), **tools},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_quickstart_runs_as_it_stands(tmp_path):
    files = [re.fullmatch(r"# (\w+\.py)\n.*", code, re.DOTALL) for language, code in blocks() if language == "python"]
    assert all(files), "a program without a name"
    for found in files:
        (tmp_path / found[1]).write_text(found[0], encoding="utf-8")
    commands, expected = zip(*steps(), strict=True)
    assert all(f"python {found[1]}" in commands for found in files), "a program that the page does not run"
    try:
        done = reader(tmp_path, f"\necho '{NEXT}'\n".join(commands))
    finally:
        reader(tmp_path, "python -m dualwrite.testing.servers down")
    assert done.returncode == 0, done.stdout
    printed = [output.strip() for output in done.stdout.split(NEXT)]
    for command, output, found in zip(commands, expected, printed, strict=True):
        assert found == output or command.startswith("pip "), command
