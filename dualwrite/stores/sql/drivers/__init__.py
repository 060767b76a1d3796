"""A single connection of a driver, below SQLAlchemy: its statements, its waits and its end.

What belongs here: code that works on one connection and knows no table of ours. May use: the errors of the database.
"""
