"""One producer that speaks Kafka's protocol itself: each of its transactions has an epoch of its own (KIP-890).

What belongs here: everything specific to this engine: its bytes, its protocol's state, its connections. May use: the
configuration, the protocol, the errors and the interfaces; never librdkafka, nor ``dualwrite.kafka.librdkafka``.
"""
