"""What a Spark worker holds: its connections, slots and lanes, and one attempt of a task.

What belongs here: what outlives a task, or names it.
May use: ``columns`` and ``options``.
"""
