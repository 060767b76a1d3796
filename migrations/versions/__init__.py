"""The migrations, ordered by number. Alembic loads each module by its path.

What belongs here: one module for each change of the tables. May use: Alembic, SQLAlchemy and
the helpers of ``dualwrite.migrations``.

Programs of the version before must keep working while a migration runs, and after it (:mod:`dualwrite.protocol.values`). So a
migration either *expands*, as all so far: it adds tables, and columns that may be null or have a default. Or it *contracts*: it
takes away what the program of the version before no longer uses; its revision then ends in ``_contract``. What a migration
adds may still be missing when the program that brings it starts: mark it with ``info={SINCE: ...}`` where it is declared, and
do without it, or refuse what needs it, until it is there (``FoundTables.has``).
"""
