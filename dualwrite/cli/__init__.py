"""The command ``dualwrite``. Needs the extra ``cli``; the library itself does not.

What belongs here: arguments, tables, exit codes. May use: ``dualwrite.recovery``, ``dualwrite.stores``,
``dualwrite.migrations`` and the protocol.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

_NEEDED: Final = ("click", "rich")
_USAGE_ERROR: Final = 2


def main() -> None:
    """Run the console script. Ends the process with the command's exit code."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"dualwrite: the command needs {' and '.join(missing)}: pip install 'dualwrite[cli]'\n")
        sys.exit(_USAGE_ERROR)
    from dualwrite.cli.options import commands  # noqa: PLC0415 - only now is click known to be installed

    commands()
