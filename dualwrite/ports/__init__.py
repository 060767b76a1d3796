"""The ports: Kafka and the database as the recipes need them, as small ``Protocol`` classes.

``dualwrite.kafka`` and ``dualwrite.stores`` implement them. Every call is bounded by the deadline passed to it; if the
server has not answered by then, the call raises :class:`~dualwrite.errors.Unavailable`: silence is never an answer.

What belongs here: interfaces, and observers that do nothing. May use: the protocol, and SQLAlchemy's types; no driver.
"""
