"""``KeyboardInterrupt`` at the n-th line that this thread runs of the library."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import dualwrite

ROOT = Path(dualwrite.__file__).parent
_OURS, _TESTING = f"{ROOT}{os.sep}", f"{ROOT / 'testing'}{os.sep}"


class Interruption:
    """Raises once, but not in finalizers: there Python prints the exception, and goes on.

    Only lines ``inside`` a function of that name count, with all that it calls; without a name, all lines do.

    Attributes:
        lines: How many lines have run.
        at: Where it was raised, None if there were not so many lines.
    """

    def __init__(self, line: int, *, inside: str | None = None) -> None:
        self._line = line
        self._inside = inside
        self.lines = 0
        self.at: str | None = None

    @contextmanager
    def armed(self) -> Generator[None, None, None]:
        """Count the lines while the block runs."""
        former = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(former)

    def _trace(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        path = frame.f_code.co_filename
        is_ours = path.startswith(_OURS) and not path.startswith(_TESTING)
        return self._count if is_ours and self._counts(frame) else None

    def _counts(self, frame: FrameType | None) -> bool:
        """Whether it is reached from the function asked for, and not from a ``__del__``, where Python swallows an interruption."""
        reached = self._inside is None
        while frame is not None:
            name = frame.f_code.co_name
            if name == "__del__":
                return False
            reached = reached or name == self._inside
            frame = frame.f_back
        return reached

    def _count(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line" and self.at is None:
            self.lines += 1
            if self.lines >= self._line > 0 and not _leaves_a_with_block(frame):
                code = frame.f_code
                self.at = f"{Path(code.co_filename).relative_to(ROOT)}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt
        return self._count


# The arguments of ``__exit__`` at the end of a block without an error.
_NO_ERROR = [("LOAD_CONST", None)] * 3
_NO_ERROR_BEFORE_3_11 = [("LOAD_CONST", None), ("DUP_TOP", None), ("DUP_TOP", None)]


def _leaves_a_with_block(frame: FrameType) -> bool:
    """Whether the next thing to run is the ``__exit__`` of a ``with`` block that has come to its end.

    Python handles no signal there, so a lock is always released. A trace function could keep it locked for ever.
    """
    following = [one for one in dis.get_instructions(frame.f_code) if one.offset >= frame.f_lasti]
    names = [(one.opname, one.argval) for one in following if one.opname not in {"CACHE", "SWAP", "NOP", "POP_BLOCK"}]
    return names[:3] in (_NO_ERROR, _NO_ERROR_BEFORE_3_11)
