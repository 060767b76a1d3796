"""Whether anything is left for a consumer that has stopped before the last stable offset."""

from types import SimpleNamespace

import pytest

from dualwrite.kafka.blocking import nothing_to_read


class Batch(SimpleNamespace):
    """The head of a batch, and the one record of a marker."""

    def __iter__(self):
        return iter([SimpleNamespace(commit=self.commit, abort=not self.commit)])


def data(first, last, producer_id=7, *, transactional=True):
    return Batch(
        base_offset=first,
        next_offset=last + 1,
        producer_id=producer_id,
        is_control_batch=False,
        is_transactional=transactional,
    )


def marker(at, producer_id=7, *, commit=True):
    return Batch(
        base_offset=at,
        next_offset=at + 1,
        producer_id=producer_id,
        is_control_batch=True,
        is_transactional=True,
        commit=commit,
    )


def aborted(producer_id, first):
    return SimpleNamespace(producer_id=producer_id, first_offset=first)


@pytest.mark.parametrize(
    ("batches", "aborts", "nothing"),
    [
        ([marker(10), marker(11, 8)], [], True),
        ([data(3, 9), marker(10), marker(11, 8)], [], True),  # the batch before is already read
        ([marker(10), data(11, 11)], [], False),
        ([marker(10), data(11, 11, transactional=False)], [aborted(7, 11)], False),
        ([data(10, 10), marker(11, commit=False)], [aborted(7, 10)], True),
        ([data(10, 10, 8), marker(11, commit=False)], [aborted(7, 10)], False),
        ([marker(10, commit=False), data(11, 11)], [aborted(7, 4)], False),  # the producer's next one is no aborted one
        ([marker(10)], [], False),  # the answer ends too early
        ([], [], False),
    ],
)
def test_only_markers_and_aborted_records_are_nothing(batches, aborts, nothing):
    assert nothing_to_read(batches, aborts, 10, 12) is nothing
