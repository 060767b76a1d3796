"""Reads Protobuf descriptors as data: from a file written by protoc, or from a generated class. Loads no code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from dualwrite.errors import ConfigurationError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FileDescriptor


def descriptor_set(message: object) -> bytes:
    """Return the descriptors of a generated message class, with their imports: for the setting ``descriptor``.

    May be called anywhere; the bytes hold no code and no secret.

    Args:
        message: A class that protoc has generated.

    Raises:
        ConfigurationError: It is no such class.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorSet  # noqa: PLC0415 - an optional package

    descriptor = getattr(message, "DESCRIPTOR", None)
    if not hasattr(descriptor, "file"):
        raise ConfigurationError(f"{message!r} is not a generated Protobuf message class")
    found = FileDescriptorSet()
    seen: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in seen:
            seen.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            file.CopyToProto(found.file.add())

    add(cast("Descriptor", descriptor).file)
    return cast("bytes", found.SerializeToString())


def read_descriptor(descriptor: str | bytes) -> bytes:
    """Return a descriptor set; read it from its file if a path is given.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    if isinstance(descriptor, bytes):
        return descriptor
    try:
        return Path(descriptor).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"the descriptor set cannot be read: {error}", next_step="the driver must be able to read that path"
        ) from error
