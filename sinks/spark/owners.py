"""How the tasks of a batch name themselves in leases."""

from __future__ import annotations

import json


def owner_prefix(batch_id: str) -> str:
    """How the names of the lease owners of a batch begin, and of no other batch."""
    return f"{json.dumps(batch_id)} "
