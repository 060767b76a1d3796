"""Real servers for tests: Kafka from its jars, PostgreSQL from its wheel; ``python -m dualwrite.testing.servers up`` by hand.

What belongs here: fetching, starting, suspending, killing and stopping servers. May use: the standard library,
``dualwrite.errors`` and ``dualwrite.runtime.deadline``.
"""
