"""Paths of znodes, and what a znode holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.stores.keyed.zookeeper import Paths, packed, quoted, unpacked, unquoted

PATHS = Paths("/app/kafka")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_a_name_is_one_part_of_a_path_and_comes_back(name: str) -> None:
    part = quoted(name)
    assert part.isascii()
    assert part.isprintable()
    assert "/" not in part
    assert part not in {".", ".."}
    assert unquoted(part) == name


def test_two_names_never_share_a_path() -> None:
    names = ["a/b", "a%2Fb", "a%252Fb", ".", "%2E", "..", "orders#1", "é", "a b"]
    assert len({PATHS.entry("state", name) for name in names}) == len(names)
    assert PATHS.entry("state", "orders#1") == "/app/kafka/state/orders#1"


@pytest.mark.parametrize("root", ["", "/", "app", "/app/", "/app//kafka"])
def test_a_root_that_is_no_path_of_its_own_is_refused(root: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the root"):
        Paths(root)


@pytest.mark.parametrize(
    ("path", "is_ours"), [("/app/kafka", True), ("/app/kafka/state/x", True), ("/app/kafka2", False)]
)
def test_what_is_the_librarys_own(path: str, is_ours: bool) -> None:
    assert PATHS.owns(path) is is_ours


@given(st.binary())
def test_an_entry_comes_back_with_the_name_of_its_life(value: bytes) -> None:
    assert unpacked("/x", packed("8f2c", value)) == ("8f2c", value)


@pytest.mark.parametrize("content", [b"", b"{}", b"dualwrite 1\n", b"dualwrite 2 8f2c\n{}", b"dualwrite 1 8f2c"])
def test_what_the_library_has_not_written_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match="bad znode /x"):
        unpacked("/x", content)
