"""The form of the library's values: one line that names the format and its version, then JSON. Pure."""

from __future__ import annotations

from typing import Final

_NAME: Final = b"dualwrite"
_FORMAT: Final = b"1"


def packed(content: bytes) -> bytes:
    """The value to store, of JSON."""
    return b"%b %b\n%b" % (_NAME, _FORMAT, content)


def unpacked(value: object) -> bytes:
    """The content of a stored value.

    Raises:
        ValueError: This version of the library cannot have written it.
    """
    line, separator, content = value.partition(b"\n") if isinstance(value, bytes) else (b"", b"", b"")
    name, _, form = line.partition(b" ")
    if not separator or name != _NAME:
        raise ValueError("dualwrite has not written it")
    if form != _FORMAT:
        shown = form.decode(errors="replace")[:20]
        raise ValueError(f"it has format {shown!r}, and this version of dualwrite reads {_FORMAT.decode()!r}")
    return content
