"""The journal keeps every complete entry, also of a process that died in the middle of a line."""

import pytest

from dualwrite import (
    CompletionPending,
    ConfigurationError,
    DecidedTransactionLost,
    Fenced,
    TransactionAborted,
    TransactionInDoubt,
    Unavailable,
)
from dualwrite.testing import Journal

OUTCOMES = [
    (TransactionAborted, "aborted"),
    (Fenced, "aborted"),
    (Unavailable, "aborted"),
    (CompletionPending, "acknowledged"),
    (TransactionInDoubt, "in_doubt"),
    (DecidedTransactionLost, "lost"),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def journal(path):
    with Journal(path) as journal:
        yield journal


def test_an_operation_whose_block_ends_is_acknowledged(journal, path):
    with journal.operation("a", stream="s"):
        assert Journal.read(path).begun == {"a": "s"}
        assert not Journal.read(path).acknowledged
    assert Journal.read(path).acknowledged == {"a"}


@pytest.mark.parametrize(("error", "where"), OUTCOMES)
def test_an_error_says_what_is_known(journal, path, error, where):
    with pytest.raises(error), journal.operation("a"):
        raise error("x")
    history = Journal.read(path)
    for name in ("acknowledged", "aborted", "in_doubt", "lost"):
        assert getattr(history, name) == ({"a"} if name == where else set())


def test_an_unknown_exception_leaves_the_operation_in_doubt_until_it_is_told(journal, path):
    with pytest.raises(KeyError), journal.operation("a"):
        raise KeyError("a")
    assert Journal.read(path).in_doubt == {"a"}
    journal.aborted("a")
    assert (Journal.read(path).in_doubt, Journal.read(path).aborted) == (set(), {"a"})


def test_an_operation_begun_again_is_no_longer_aborted(journal, path):
    journal.begun("a")
    journal.aborted("a")
    journal.begun("a")
    assert Journal.read(path).aborted == set()


def test_a_line_without_its_end_was_never_written(journal, path):
    journal.begun("a")
    with path.open("a") as file:
        file.write("acknowledged\t\ta")
    assert Journal.read(path).acknowledged == set()


@pytest.mark.parametrize("line", ["acknowledged\t\tb", "begun\t\tb\tw\tx", "nonsense\t\ta", "begun a", ""])
def test_a_line_that_no_journal_wrote_is_named(journal, path, line):
    journal.begun("a")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigurationError, match="line 2"):
        Journal.read(path)


@pytest.mark.parametrize("name", ["", "a\tb", "a\n"])
def test_a_name_that_cannot_be_a_line_is_refused(journal, name):
    with pytest.raises(ValueError, match="line of the journal"):
        journal.begun(name)


def test_a_journal_tells_which_was_acknowledged_before_another_began(journal, path):
    with journal.operation("a", writer="w"):
        pass
    journal.begun("b", stream="s", writer="w")
    found = Journal.read(path)
    assert found.writers == {"a": "w", "b": "w"}
    assert found.began_at["a"] < found.acknowledged_at["a"] < found.began_at["b"]


def test_two_journals_of_one_file_continue_each_other(journal, path):
    journal.begun("a")
    with Journal(path) as other:
        other.begun("b")
    journal.begun("c")
    assert list(Journal.read(path).begun) == ["a", "b", "c"]
