"""The migrations, ordered by number. Alembic loads each module by its path."""
