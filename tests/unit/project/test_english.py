"""Docstrings, comments, messages and pages keep to short, active English: phrases that read as translated are refused."""

import re
from pathlib import Path

import pytest
from harness.places import ROOT

CODE = ("dualwrite", "sinks", "migrations", "examples", "benchmarks")
TESTS = ROOT / "tests"
PAGES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if not page.name.startswith("proof-")
]  # not the generated ones
TEXTS = [
    *(path for name in CODE for path in sorted((ROOT / name).rglob("*.py"))),
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for end in ("py", "md", "txt") for path in sorted(TESTS.rglob(f"*.{end}")) if path != Path(__file__)),
]

_TOLD = r"\b(?:is|are|was|were|been) told\b"
_BECAME = r"\b(?:becomes?|became) of\b"
_GO_ON = r"\b(?:go|goes|going|gone|went) on\b"
_SO_MANY = r"\bso many\b"
_TIME_OUT = r"\btime-outs?\b"
_FOR_EVER = r"\bfor ever\b"
ONLY_IN_THE_PRODUCT = frozenset({_TOLD, _BECAME, _GO_ON, _SO_MANY, _TIME_OUT, _FOR_EVER})
"""Not banned in tests, whose checkers compare what a caller "was told", and whose names and generated pages use the others."""

# For each pattern, what to write instead, and a sentence in which it must be found.
BANNED = {
    r"\banew\b": ("again", "The slot is claimed anew."),
    r"\b(?:is|are|was|were) to be\b": ("must, or the imperative", "The row is\n    # to be settled first."),
    _TOLD: ("what is reported, and to whom", '"the driver was "\n"told of the loss"'),
    r"(?<!\bare\s)\ball the same\b": ("nevertheless, still", "It was written all the same."),
    r"\bbut for\b": ("except for, besides", "Nothing but for the ledger is written."),
    r"\bwhoever\b": ("the process: owner, settler, driver", "Whoever settles next finds it."),
    r'"""(?:what|who|whom|whose)\b': ("a noun phrase, or a verb", '"""What the task has prepared."""'),
    r"\b(?:he|him|his)\b": ("it, or the name of the process", "A fenced owner loses his rows."),
    r"\bbounds the whole\b": ("limits", "timeout_s: Bounds the whole call."),
    r"\banyhow\b": ("regardless, in any case", "It will be aborted anyhow."),
    r"\bthr(?:ows?|ew|own|owing) away\b": ("discarded", "The producer is thrown\n# away."),
    r"\btried again\b": ("retried, retrying", 'warning("not renewed, tried again: %s")'),
    r"\bat hand\b": ("current, given", "It belongs to the block at hand."),
    _BECAME: ("its outcome, how it ended", "The log shows what became of it."),
    _GO_ON: ("continues", "The other units go on."),
    _SO_MANY: ("this many, that many", "A lease ends after so many seconds."),
    _TIME_OUT: ("timeout", "It waits without a time-out."),
    _FOR_EVER: ("forever", "The table would grow for ever."),
    r"\bexclude each other\b": ("cannot be combined", "The two settings exclude each other."),
    r"\bseldom\b": ("rarely, too rare", "A heartbeat is too seldom."),
    r"\bsomebody\b": ("the process, or another process", "Somebody else has claimed the id."),
}
_GAP = r"""[\s"'#]+"""  # a phrase may continue in the next line of a comment, or in the next part of a string
_PATTERNS = {text: re.compile(text.replace(" ", _GAP), re.IGNORECASE) for text in BANNED}


def found_in(text, allowed=frozenset()):
    """The banned phrases of a text: the line's number, the line, the phrase, and what to write instead."""
    lines = text.splitlines()
    for banned in BANNED.keys() - allowed:
        for match in _PATTERNS[banned].finditer(text):
            number = text.count("\n", 0, match.start()) + 1
            yield f"line {number}: {lines[number - 1].strip()} <- not {match[0]!r}: write {BANNED[banned][0]}"


def _folder(path):
    """At most two deep: a test for each file would cost more than the search."""
    return str(Path(*path.relative_to(ROOT).parts[:-1][:2]))


@pytest.mark.parametrize("folder", sorted({_folder(path) for path in TEXTS}))
def test_there_is_no_banned_phrase_in(folder):
    found = []
    for path in TEXTS:
        if _folder(path) == folder:
            allowed = ONLY_IN_THE_PRODUCT if path.is_relative_to(TESTS) else frozenset()
            found += [f"{path.relative_to(ROOT)}, {one}" for one in found_in(path.read_text(encoding="utf-8"), allowed)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(("instead", "sentence"), BANNED.values())
def test_a_planted_phrase_is_found_and_its_line_is_named(instead, sentence):
    (found,) = found_in(f'"""A module."""\n{sentence}\n')
    assert found.startswith(f"line 2: {sentence.splitlines()[0].strip()}")
    assert found.endswith(instead)


def test_words_that_contain_a_banned_one_are_allowed():
    assert list(found_in("The theory: this row is the first, these are all the same, this is how to begin.")) == []
