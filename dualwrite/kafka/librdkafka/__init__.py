"""One librdkafka producer (confluent-kafka), driven by the producer's state machine.

What belongs here: everything specific to librdkafka: deadlines around its calls, its errors, signs that its state is in
doubt. May use: the configuration, the protocol, and of ``dualwrite.kafka.producer`` only ``ends`` and
``transaction_timeout``.
"""
