"""An engine made from a URL notices a server that is gone; what the user has set stays."""

import pytest
from sqlalchemy import make_url

from dualwrite.stores.connecting import LIVENESS, liveness_of


def test_a_url_that_says_nothing_gets_all_of_it():
    assert liveness_of(make_url("postgresql+psycopg://db/x")) == LIVENESS


@pytest.mark.parametrize("name", LIVENESS)
def test_what_the_url_says_stays(name):
    found = liveness_of(make_url(f"postgresql+psycopg://db/x?{name}=7"))
    assert found == {key: value for key, value in LIVENESS.items() if key != name}


def test_a_service_file_may_say_it():
    assert liveness_of(make_url("postgresql+psycopg:///?service=shop")) == {}


def test_other_databases_have_no_such_settings():
    assert liveness_of(make_url("sqlite:///x.db")) == {}
