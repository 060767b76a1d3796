"""The column families of the library's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FAMILIES: Final[Mapping[str, str]] = {"state": "kafka_transaction_state", "incident": "dualwrite_incident"}
"""By table."""
OWN: Final = frozenset(FAMILIES.values())
