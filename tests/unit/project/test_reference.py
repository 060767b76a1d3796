"""The reference shows every member of a public class that users may need, and explains every argument of what it lists.

Sphinx leaves out, without a word, members that no option names, inherited ones, and those without a docstring.
"""

import importlib
import inspect
import re
from typing import NamedTuple

import pytest
import typing_extensions
from harness.places import ROOT

from dualwrite.interfaces import Database, Observer
from dualwrite.stores.keyed.store import KeyedDatabase

PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^\.\. auto(?:class|exception|function):: ([\w.]+)(\(\))?\n((?:   :.*\n)*)", re.MULTILINE)

CALLED_BY_THE_LIBRARY = {
    name for port in (Database, KeyedDatabase, Observer) for name in vars(port) if not name.startswith("_")
}
FRAMEWORKS = {"django", "fastapi", "litestar", "faststream", "openlineage"}
NOT_FOR_USERS = {
    "DualWriteDataSource": {"name", "writer", "streamWriter"},  # Spark calls them
    "History": {"add"},  # Journal.read makes it
    "PreparedTxnState": {"native"},  # the native engine makes it
    "RowUnit": {"goes_with", "produce", "rows"},  # its group calls them
    "Scan": {"end"},  # its store calls it
    "SinkOptions": {
        *("database_url", "format_of_value", "kafka_config", "kafka_settings"),  # the driver and the tasks
        *("most_quarantined", "quarantines"),  # as above
        *("operations", "pool", "registry_settings"),
    },
    "SourceOptions": {"parse"},  # the format calls it
}
EXPLAINED_BY = {
    "SinkSettings": "SinkOptions",
    "WriterOptions": "DualWriter",
    "AsyncWriterOptions": "AsyncDualWriter",
}  # the same names, as keyword arguments


class Entry(NamedTuple):
    thing: type
    shows_signature: bool
    options: dict[str, str]


def entries(page):
    for path, hidden, options in ENTRY.findall(page):
        package, _, name = path.rpartition(".")
        try:
            thing = getattr(importlib.import_module(package), name)
        except ImportError as error:
            if error.name in FRAMEWORKS:  # its extra is not installed
                continue
            raise
        yield path, Entry(thing, not hidden, dict(re.findall(r":([\w-]+): ?(.*)", options)))


ENTRIES = dict(entries(PAGE))
CLASSES = {path: entry for path, entry in ENTRIES.items() if isinstance(entry.thing, type)}
BY_NAME = {entry.thing.__name__: entry.thing for entry in CLASSES.values()}


def explained(thing):
    """The names in a docstring's lists of arguments and attributes."""
    other = EXPLAINED_BY.get(thing.__name__)
    lists = re.findall(r"^ *([\w*, ]+):(?: |$)", inspect.getdoc(BY_NAME[other] if other else thing) or "", re.MULTILINE)
    return {name.strip(" *") for names in lists for name in names.split(",")}


def members(kind):
    """Every member without an underscore that this library has given a class, annotated fields included."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith("dualwrite")]
    names = {name for one in ours for name in (*vars(one), *vars(one).get("__annotations__", ()))}
    return {name for name in names if not name.startswith("_")}


def shown(entry):
    """The members that Sphinx shows of a class, here or with a base class."""
    named, options = explained(entry.thing), entry.options
    listed = {name.strip() for name in options.get("members", "").split(",")} - {""}
    if "members" in options and not listed:
        listed = members(entry.thing) if "inherited-members" in options else {*vars(entry.thing)}
    documented = {
        name for name in listed if "undoc-members" in options or inspect.getdoc(getattr(entry.thing, name, None))
    }
    bases = [other for other in CLASSES.values() if other.thing in entry.thing.__mro__[1:]]
    return named | documented | {name for base in bases for name in shown(base)}


def not_shown(entry):
    return members(entry.thing) - shown(entry) - CALLED_BY_THE_LIBRARY - NOT_FOR_USERS.get(entry.thing.__name__, set())


@pytest.mark.parametrize("path", CLASSES)
def test_every_public_member_is_in_the_reference(path):
    assert sorted(not_shown(CLASSES[path])) == []


@pytest.mark.parametrize("path", [path for path, entry in ENTRIES.items() if entry.shows_signature])
def test_every_argument_is_explained(path):
    thing = ENTRIES[path].thing
    assert [name for name in inspect.signature(thing).parameters if name not in explained(thing)] == []


def test_what_users_may_not_call_is_still_there():
    assert {name for name, hidden in NOT_FOR_USERS.items() if not hidden <= members(BY_NAME[name])} == set()


def test_a_member_that_the_page_no_longer_lists_is_found():
    page = PAGE.replace("run, stop, progress", "run, progress")
    assert not_shown(dict(entries(page))["dualwrite.ExactlyOnceConsumer"]) == {"stop"}


def functions_of(thing):
    """The public functions of a class, or a function itself, by name; those of the constructor, too."""
    if not isinstance(thing, type):
        return {thing.__name__: thing}
    found = {}
    for kind in thing.__mro__:
        if kind.__module__.startswith("dualwrite"):
            for name, one in vars(kind).items():
                if name == "__init__" or not name.startswith("_"):
                    plain = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
                    found.setdefault(name, plain)
    return {name: one for name, one in found.items() if inspect.isfunction(one)}


def untyped(thing):
    """Where a signature, an overload's or the type of a field says ``Any``: a caller's type checker then checks nothing."""
    signatures = [
        (name, form.__annotations__)
        for name, one in functions_of(thing).items()
        for form in (*typing_extensions.get_overloads(one), one)
    ]
    if isinstance(thing, type):
        signatures.append(("", vars(thing).get("__annotations__", {})))
    return [
        f"{name} {given}".strip()
        for name, annotations in signatures
        for given, annotation in annotations.items()
        if re.search(r"\bAny\b", str(annotation)) and not given.startswith("_")
    ]


@pytest.mark.parametrize("path", ENTRIES)
def test_no_public_signature_says_any(path):
    assert untyped(ENTRIES[path].thing) == []


def test_a_signature_that_says_any_is_found():
    class Writer:
        def bind(self, sessions: "Sequence[Any]") -> None:  # noqa: F821
            """Takes anything."""

    Writer.__module__ = "dualwrite.planted"
    assert untyped(Writer) == ["bind sessions"]
