"""The differences between PostgreSQL, MariaDB, MySQL and SQLite, and what a driver reveals about its connection.

What belongs here: one module for each database, and code that works on a single connection. May use: the tables and the
failures.
"""
