"""The migrations, ordered by number. Alembic loads each module by its path.

What belongs here: one module for each change of the tables. May use: Alembic, SQLAlchemy and ``batch_view``.
"""
