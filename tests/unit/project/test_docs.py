"""The documentation names what there is, and its links and code are not broken."""

import ast
import inspect
import re
import runpy
import sys
import textwrap
from typing import Literal, get_origin

import pytest
from harness.places import ROOT

import dualwrite
import dualwrite.databases
import dualwrite.operations
import dualwrite.sinks.spark
import dualwrite.state
import dualwrite.testing
import dualwrite.types
import dualwrite.units
from dualwrite import DualWriteError, failpoints
from dualwrite.cli.options import COMMANDS
from dualwrite.stores.sql.tables import BATCH_VIEW, OWN_TABLES

PUBLIC_MODULES = (
    *(dualwrite, dualwrite.databases, dualwrite.errors, dualwrite.operations, dualwrite.sinks, dualwrite.sinks.spark),
    *(dualwrite.state, dualwrite.testing, dualwrite.types, dualwrite.units),
)
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("runbooks/*.md"))]
CODE = [path for name in ("dualwrite", "sinks", "migrations") for path in sorted((ROOT / name).rglob("*.py"))]

KINDS_OF_CHANGE = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def is_mentioned(name, text):
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("name", [f"{module.__name__}.{name}" for module in PUBLIC_MODULES for name in module.__all__])
def test_public_name_is_in_the_reference(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules[module], attribute)
    assert inspect.getdoc(found) or get_origin(found) is Literal  # an alias has its text in the source alone
    # A name that two modules have is shown where most people look for it.
    places = [one.__name__ for one in PUBLIC_MODULES if attribute in one.__all__ and one.__name__ != module]
    shown = [rf":: {re.escape(place)}\.{attribute}(\(\))?$" for place in (module, *places)]
    assert any(re.search(one, text_of("reference.md"), re.MULTILINE) for one in shown)


@pytest.mark.parametrize(
    "path", [path for path in CODE if path.name == "__init__.py"], ids=lambda path: path.parent.name
)
def test_every_package_says_what_belongs_there_and_what_it_may_use(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert "What belongs here: " in text
    assert re.search(r"\b[Mm]ay use\b", text)


@pytest.mark.parametrize("name", failpoints.FAILPOINTS)
def test_fail_point_is_documented_with_its_meaning(name):
    assert f"| `{name}` | {failpoints.FAILPOINTS[name]} |" in text_of("testing.md")


def test_fail_points_that_are_hit_are_the_ones_declared():
    hit = {name for path in CODE for name in re.findall(r'hit\("([^"]+)"\)', path.read_text(encoding="utf-8"))}
    assert hit == set(failpoints.FAILPOINTS)


@pytest.mark.parametrize(
    ("takes_them", "heading"),
    [
        (dualwrite.DualWriter, "`DualWriter`"),
        (dualwrite.WriterLimits, "`WriterLimits`"),
        (dualwrite.TransactionalProducer, "`TransactionalProducer`"),
        (dualwrite.recover, "`recover` and `status`"),
    ],
)
def test_every_argument_is_in_the_configuration_page(takes_them, heading):
    section = text_of("configuration.md").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    assert [name for name in inspect.signature(takes_them).parameters if not is_mentioned(name, section)] == []


def test_every_error_says_in_the_operating_page_what_to_do():
    table = text_of("operating.md")
    assert [kind.__name__ for kind in DualWriteError.__subclasses__() if f"| `{kind.__name__}` |" not in table] == []


def test_every_command_is_in_the_operating_page():
    text = text_of("operating.md")
    assert [name for name in COMMANDS if f"### `dualwrite {name}`" not in text] == []


def test_every_table_is_in_the_page_of_databases():
    listed = re.findall(
        r"^\| `(\w+)` \|", text_of("databases.md").partition("## Tables")[2].partition("## Grants")[0], re.MULTILINE
    )
    assert sorted(listed) == sorted({*OWN_TABLES, BATCH_VIEW})


def test_every_environment_variable_is_in_the_configuration_page():
    code = "".join(path.read_text(encoding="utf-8") for path in CODE)
    named = set(re.findall(r"\bDUALWRITE_[A-Z_]+\b", code))
    assert named
    assert {name for name in named if not is_mentioned(name, text_of("configuration.md"))} == set()


def test_every_page_is_in_the_table_of_contents():
    lines = "".join(
        block for name in ("index", "alerts") for block in blocks(DOCS / f"{name}.md", r"\{toctree\}")
    ).splitlines()
    patterns = [line for line in lines if line and not line.startswith(":")]
    listed = [found for pattern in patterns for found in DOCS.glob(f"{pattern}.md")]
    assert sorted(listed) == sorted(page for page in PAGES[1:] if page.stem != "index" and not is_orphan(page))
    assert len(listed) >= len(patterns), "a page that is listed is there"


def is_orphan(page):
    """Whether a page is about something that is not offered yet: Sphinx then expects no link to it."""
    return page.read_text(encoding="utf-8").startswith("---\norphan: true\n---\n")


@every_page
def test_internal_links_resolve(page):
    broken = []
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@every_page
def test_python_blocks_compile(page):
    for code in blocks(page, "python"):
        ast.parse(textwrap.dedent(code), filename=page.name)


@every_page
def test_no_page_names_a_path_of_one_machine(page):
    assert re.findall(r"(?<![\w.])/(?:work|tmp|root|home)/", page.read_text(encoding="utf-8")) == []


def test_the_changelog_keeps_to_its_manner():
    """Versions from the newest on, the kinds of change once each: https://keepachangelog.com/en/1.1.0/."""
    versions = re.split("^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    names = [version.splitlines()[0] for version in versions]
    assert [name for name in names[1:] if re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", name) is None] == []
    assert names[0] == "[Unreleased]"
    for version in versions:
        kinds = re.findall("^### (.*)$", version, re.MULTILINE)
        assert kinds == [kind for kind in KINDS_OF_CHANGE if kind in kinds]


def test_the_pictures_are_those_that_are_drawn():
    drawing = runpy.run_path(str(DOCS / "pictures.py"))
    drawn = {f"{name}.svg": draw() for name, draw in drawing["PICTURES"].items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("picture-*.svg")} == drawn


def test_the_state_diagrams_are_made_from_the_tables():
    """Without Graphviz: a drawing begins with what it was made from."""
    drawing = runpy.run_path(str(DOCS / "pictures.py"))
    made_from = {
        f"{name}.svg": drawing["states"](table, first) for name, (_, table, first) in drawing["STATES"].items()
    }
    found = {path.name: path.read_text(encoding="utf-8").split("\n-->")[0] for path in DOCS.glob("states-*.svg")}
    assert found == {name: f"<!--\n{graph}" for name, graph in made_from.items()}


def test_the_classifiers_name_the_pythons_that_are_tested():
    """The usual one, 3.11, and those of `make pythons`."""
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    [others] = re.findall(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(["3.11", *others.split()])


def test_the_versions_of_kafka_in_the_table_are_those_that_are_tested():
    tests = (ROOT / "tests" / "integration" / "test_kafka_versions.py").read_text("utf-8")
    tested = set(re.findall(r'"(\d\.\d\.\d)"', tests)) | {
        *re.findall(r"<version>(\d\.\d\.\d)<", (ROOT / "dualwrite/testing/servers/pom.xml").read_text("utf-8"))[:1]
    }
    rows = re.findall(r"^\| ([0-9., ]+) \|", (ROOT / "docs" / "kafka.md").read_text("utf-8"), re.MULTILINE)
    assert {version for row in rows for version in row.split(", ")} == tested
