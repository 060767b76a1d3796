"""The Django app: messages that commit with ``transaction.atomic()``. ``INSTALLED_APPS = ["dualwrite.django"]``.

What belongs here: Django's settings, transactions, commands and migrations, turned into calls of the library's own. May use:
every package of the library. The library itself never imports it, and it is of no use without Django.
"""

from __future__ import annotations

from dualwrite.errors import extra_missing

try:
    import django as _  # noqa: F401 - said here, once, if it is missing
except ImportError as error:
    raise extra_missing("django", error) from error

from dualwrite.django.writers import captured_messages, database_url, join, produce, writers

__all__ = ["captured_messages", "database_url", "join", "produce", "writers"]
