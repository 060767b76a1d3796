"""The databases: what differs between PostgreSQL and SQLite, and what a driver can tell of its connection.

What belongs here: one module for each database, and what only their connections need. May use: the tables and the failures.
"""
