"""The page of the fault matrix is what its results make of it, and its findings about native transactions are found."""

import json

import pytest
from faults import page
from faults.cells import cells_of
from faults.late import hit_by_a_late_request
from faults.sent import by_version, not_native

from dualwrite.testing.proxy import KafkaRequest


def test_the_page_is_that_of_the_results():
    results = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    assert page.PAGE.read_text(encoding="utf-8") == page.render(results)


def test_each_cell_of_both_engines_has_results():
    results = json.loads(page.RESULTS.read_text(encoding="utf-8"))
    for engine in page.ENGINES:
        assert {str(cell) for cell in cells_of(engine)} <= results[engine]["cells"].keys()


@pytest.mark.parametrize(("key", "version"), [(24, 5), (25, 4), (26, 4), (0, 11), (28, 4)])
def test_requests_that_add_to_a_transaction_or_do_not_name_it_are_not_native(key, version):
    assert len(not_native(by_version([KafkaRequest(key, version, 1, None)]))) == 1


def test_other_requests_may_have_any_version():
    assert by_version([KafkaRequest(3, 1, 1, None)]) == {}


def test_a_late_request_may_abort_nothing_whose_block_does_not_raise():
    told = [("aborted", "w1-1"), ("aborted", "w1-2"), ("acknowledged", "w1-3")]
    assert hit_by_a_late_request(told, {"w1-2", "w1-3"}) == ["w1-2 was aborted by a request that came late"]
