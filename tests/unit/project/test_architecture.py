"""The architecture page shows the library's chapters in their own words: ``python test_architecture.py`` writes them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- chapters: begin -->\n", "<!-- chapters: end -->\n"
PACKAGES = (
    *("", "protocol", "kafka", "kafka/native", "kafka/librdkafka", "stores", "stores/sql", "stores/keyed"),
    *(
        "recovery",
        "writing",
        "asyncio",
        "consumer",
        "cli",
        "serving",
        "telemetry",
        "state",
        "units",
        "django",
        "frameworks",
        "testing",
        "testing/memory",
    ),
    *("testing/servers", "sinks", "sinks/spark", "sinks/spark/databases", "sinks/spark/formats"),
)
OF_DJANGO = {ROOT / "dualwrite/django" / name for name in ("management", "management/commands", "migrations")}
"""Folders in which Django looks for one file each."""
LONGEST = 1200
"""A chapter has up to 1,000 lines; one that is longer still should become two."""


def folder_of(package):
    return ROOT / package if package.startswith("sinks") else ROOT / "dualwrite" / package


def words(path):
    """The first paragraph at the head of a module, as Markdown."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", paragraph)
    return re.sub(r"``([^`]+)``", r"`\1`", paragraph)


def chapters():
    """One paragraph for each package, and a line for each of its chapters."""
    for package in PACKAGES:
        folder = folder_of(package)
        name = f"{package}/" if package.startswith("sinks") else f"dualwrite/{package}/".replace("//", "/")
        yield f"\n**`{name}`** {words(folder / '__init__.py')}\n\n"
        for path in sorted(folder.glob("*.py")):
            if not path.stem.startswith("_"):
                yield f"- `{path.stem}`: {words(path)}\n"


def shown():
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def test_the_page_shows_every_chapter_in_its_own_words():
    assert shown() == "".join(chapters()), "python tests/unit/project/test_architecture.py writes it again"


def test_every_package_is_on_the_page():
    found = {path.parent for top in ("dualwrite", "sinks") for path in (ROOT / top).rglob("__init__.py")}
    assert found == {folder_of(package) for package in PACKAGES} | {ROOT / "sinks" / "spark_discovery"} | OF_DJANGO


def test_no_chapter_is_longer_than_a_reader_can_follow():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "dualwrite").rglob("*.py")}
    assert {path.name: count for path, count in lines.items() if count > LONGEST} == {}


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "".join(chapters()) + END + rest.partition(END)[2], encoding="utf-8")
