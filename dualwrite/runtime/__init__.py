"""Deadlines, waits of threads and tasks, and the fail points that tests arm.

What belongs here: nothing that knows Kafka, a database or the protocol. May use: the standard library and ``dualwrite.errors``.
"""
