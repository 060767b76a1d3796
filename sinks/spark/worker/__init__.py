"""A Spark worker's connections, slots and lanes, and one attempt of a task.

What belongs here: whatever outlives a task or identifies it.
May use: ``databases``, ``columns`` and ``options``.
"""
