"""Plants the mistake that the environment names, in a process that was started to make it. Costs nothing where none is named."""

import os

ENVIRONMENT = "DUALWRITE_MISTAKE"
ENGINE = "DUALWRITE_PRODUCER_ENGINE"
"""Names the producers' engine; a mistake is planted into programs of one of them."""


def plant_from_environment() -> None:
    """Plant it, for the life of this process."""
    plant(os.environ.get(ENVIRONMENT))


def plant(name: str | None) -> None:
    """Plant it, for the life of this process. Does nothing where nothing is named or it is planted already."""
    if name:
        from harness.mistakes.registry import plant_for_good

        plant_for_good(name)
