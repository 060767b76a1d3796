"""MariaDB and MySQL through PyMySQL: INSERTs of many rows, staging tables in InnoDB, no prepared transactions.

What belongs here: everything that only MariaDB and MySQL do so. May use: ``..database``, ``columns`` and ``options``; not
the other kinds of database.
"""
