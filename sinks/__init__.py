"""Sinks: dual writes from data processing engines.

What belongs here: one package for each engine, and what they share; and the batches that sinks have written, which a program
without such an engine may read. May use: the whole library but ``dualwrite.cli`` and ``dualwrite.testing``.
"""

from dualwrite.stores.sql.ledger import Batch, read_batches

__all__ = ["Batch", "read_batches"]
