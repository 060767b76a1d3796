"""The ports: Kafka and the database as the recipes need them, as small protocols.

The real adapters are in ``dualwrite.kafka`` and ``dualwrite.stores``. Every call is bounded by the deadline it is given; if a
server does not answer until then, the call raises :class:`~dualwrite.errors.Unavailable`: silence is never an answer.
"""
