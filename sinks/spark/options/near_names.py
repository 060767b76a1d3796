"""A name that is not known: what was meant, for the error that refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


def did_you_mean(given: str, known: Mapping[str, str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """The next step for whoever has given an unknown name.

    Args:
        given: What was given.
        known: The names there are, as they are compared, each with how it is shown.
        otherwise: What to say where none is near.
        cutoff: How near a name must be, from 0 to 1; as :func:`difflib.get_close_matches` has it.
    """
    near = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f"did you mean {known[near[0]]!r}?" if near else otherwise
