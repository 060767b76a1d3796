"""Kafka adapters: connections, the transactional producer (librdkafka or the native engine), and access to coordinators.

What belongs here: code that talks to brokers, and the configuration of every client. May use: the interfaces and the protocol.
"""
