"""Every error says what, to whom and what next, and survives a pickle."""

import pickle

import pytest

import dualwrite
from dualwrite import databases, errors, operations, types
from dualwrite.errors import DualWriteError


def all_errors(kind=DualWriteError):
    yield kind
    for child in kind.__subclasses__():
        yield from all_errors(child)


@pytest.mark.parametrize("kind", list(all_errors()))
def test_errors_pickle_whole(kind):
    error = kind("it broke", transactional_id="orders", next_step="fix it")
    if hasattr(error, "retryable"):
        error.retryable = False
    if hasattr(error, "state"):
        error.state = "42:0"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error) == "orders: it broke (fix it)"
    assert vars(back) == vars(error)


@pytest.mark.parametrize("kind", [kind for kind in all_errors() if kind is not DualWriteError])
def test_every_error_is_exported_and_says_what_is_known(kind):
    assert kind.__name__ in errors.__all__
    assert kind.outcome in {"none", "aborted", "decided", "lost", "unknown"}


def test_exports_are_complete_and_sorted():
    for module in (dualwrite, databases, errors, operations, types):
        assert sorted(module.__all__) == module.__all__
        assert all(hasattr(module, name) for name in module.__all__)
    for module in (dualwrite, databases, types):
        with pytest.raises(AttributeError):
            module.no_such_name  # noqa: B018
