"""The ways of each kind of database: its catalog, its bulk writes, its staging tables.

What belongs here: ``database`` has what the sinks ask for, and one module for each kind answers it.
May use: ``column_types``, ``digests``, ``layout`` and ``options``.
"""
