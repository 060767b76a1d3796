"""The tables of the library: their declaration, the types of their columns, and their rows, checked before use.

What belongs here: what each table holds, and what a row means. May use: the protocol and SQLAlchemy; no connection to
a particular kind of database.
"""
