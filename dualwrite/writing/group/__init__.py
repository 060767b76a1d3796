"""Group commit: the units of many callers in one dual write, each in a savepoint of its own.

What belongs here: one dual write divided into units, and the threads that run groups. May use: what ``dualwrite.writing``
may, and its modules below the writer.
"""
