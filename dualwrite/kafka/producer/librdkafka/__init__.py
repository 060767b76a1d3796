"""One librdkafka producer (confluent-kafka), driven by the producer's state machine.

What belongs here: whatever only librdkafka needs: deadlines around its calls, its errors, what makes it doubtful.
May use: the configuration, and from ``dualwrite.kafka.producer`` what is no verb.
"""
