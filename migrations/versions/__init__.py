"""The migrations, in the order of their numbers. Each is a module that Alembic loads by its path."""
