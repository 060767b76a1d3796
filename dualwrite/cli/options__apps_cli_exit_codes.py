"""Exit codes for scripts, and the one place that turns our errors into them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import click

from dualwrite.errors import DualWriteError, Unavailable

P = ParamSpec("P")
R = TypeVar("R")

ERROR: Final = 1
NEEDS_RECOVERY: Final = 3
INCIDENTS: Final = 4
UNAVAILABLE: Final = 5
NO_SUCH_ID: Final = 6
LEFT_ALONE: Final = 7
WENT_BACK: Final = 8


def exit_code_for_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn an error of ours into one line on standard error and an exit code; any other error keeps its traceback."""

    @wraps(command)
    def reported(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except DualWriteError as error:
            click.echo(f"dualwrite: {type(error).__name__}: {error}", err=True)
            sys.exit(UNAVAILABLE if isinstance(error, Unavailable) else ERROR)

    return reported
