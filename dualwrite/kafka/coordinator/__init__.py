"""Kafka from outside of a producer, over kafka-python: transactions listed, looked at, ended, and proved from the log.

What belongs here: requests, their routing, and what their answers mean. May use: the configuration.
"""
