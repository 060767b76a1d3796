"""The ways of each kind of database: its catalog, its bulk writes, its staging tables.

What belongs here: ``database`` has what the sinks ask for, and one package for each kind answers it.
May use: ``columns`` and ``options``.
"""
