"""Where the repository is, for tests that read its files, and for processes that they start."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
TESTS: Final = ROOT / "tests"
PROOF: Final = TESTS / "proof"
"""Where a new process finds the laboratory's packages, such as `harness`."""
