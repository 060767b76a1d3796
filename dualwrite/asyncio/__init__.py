"""The writer and the consumer for tasks of an event loop.

What belongs here: forms of the writer's and the consumer's classes for ``async`` code. Nothing here decides, settles or
ends a dual write by itself. May use: ``dualwrite.consumer``, ``dualwrite.writing`` and everything below it.
"""

from __future__ import annotations

from dualwrite.errors import extra_missing

try:
    import greenlet as _  # noqa: F401 - said here, once: SQLAlchemy's own error names an extra of SQLAlchemy
except ImportError as error:
    raise extra_missing("async", error) from error
