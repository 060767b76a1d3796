"""Django in the process of a test: configured once, with databases that each test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings
from django.db import connections
from sqlalchemy import make_url


def database(url: str) -> dict[str, Any]:
    """The entry in ``DATABASES`` for a database on PostgreSQL."""
    found = make_url(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": found.database,
        "USER": found.username,
        "PASSWORD": found.password,
        "HOST": found.host or found.query["host"],
        "PORT": found.port or found.query.get("port", ""),
    }


@contextmanager
def using(databases: Mapping[str, Mapping[str, Any]]) -> Iterator[Any]:
    """Django's connections lead to these databases; those of this thread are closed afterwards."""
    given: Any = dict(databases)
    if not settings.configured:
        settings.configure(
            DATABASES=given,
            INSTALLED_APPS=["dualwrite.django"],
            ROOT_URLCONF=(),
            USE_TZ=True,
            ALLOWED_HOSTS=["testserver"],
        )
        django.setup()
    former = connections.settings
    for alias in {*former, *given}:
        if hasattr(connections._connections, alias):
            del connections[alias]
    connections.settings = connections.configure_settings(given)
    try:
        yield connections
    finally:
        connections.close_all()
