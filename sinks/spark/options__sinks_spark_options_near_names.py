"""Suggestions for errors that refuse an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping


def did_you_mean(given: str, known: Mapping[str, str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """The next step for an error about an unknown name.

    Args:
        given: The unknown name.
        known: The known names: as compared, mapped to as shown.
        otherwise: The next step if no name is near.
        cutoff: How near a name must be, from 0 to 1; see :func:`difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f"did you mean {known[near[0]]!r}?" if near else otherwise
