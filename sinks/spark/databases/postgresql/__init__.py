"""PostgreSQL through psycopg 3: binary COPY, unlogged staging tables, prepared transactions.

What belongs here: everything that only PostgreSQL does so. May use: ``..database``, ``columns`` and ``options``; not the
other kinds of database.
"""
