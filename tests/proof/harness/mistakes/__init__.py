"""Planted protocol mistakes: the product with one rule broken, to show that the checks would catch it.

Nothing of this is in the product. A mistake patches its functions from here, while ``with planted(name)`` lasts, or, by the
environment variable ``DUALWRITE_MISTAKE``, in a whole process::

    DUALWRITE_MISTAKE=unconditional_update python -m pytest tests/integration/test_faults.py

``python -m controls`` (in `tests/proof`) plants each of them and runs the checks that must fail.
"""

from harness.mistakes import (
    consumer,
    database,
    grouping,
    handing_over,
    kafka,
    leases,
    native,
    native_engine,
    outbox,
    rocksdb,
    settling,
    spark,
    state,
    units,
    writing,
    zookeeper,
)
from harness.mistakes.registry import MISTAKES, Check, Mistake, planted
from harness.planting import ENVIRONMENT

__all__ = [
    "ENVIRONMENT",
    "MISTAKES",
    "Check",
    "Mistake",
    "consumer",
    "database",
    "grouping",
    "handing_over",
    "kafka",
    "leases",
    "native",
    "native_engine",
    "outbox",
    "planted",
    "rocksdb",
    "settling",
    "spark",
    "state",
    "units",
    "writing",
    "zookeeper",
]
