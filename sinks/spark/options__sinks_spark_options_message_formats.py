"""The formats of messages' keys and values."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Format(str, Enum):
    """How a message's key or value is written."""

    JSON = "json"
    RAW = "raw"
    AVRO = "avro"
    JSON_SCHEMA = "jsonschema"
    PROTOBUF = "protobuf"

    def __str__(self) -> str:
        return self.value


REGISTERED: Final = frozenset({Format.AVRO, Format.JSON_SCHEMA, Format.PROTOBUF})
"""The formats that are written with a schema from the registry."""
KEY_FORMATS: Final = tuple(str(item) for item in Format if item is not Format.JSON)
