"""Transactional producers: the verbs that users and the writer call, over an engine.

What belongs here: everything that does not depend on the engine. May use: ``dualwrite.kafka.coordinator``, the
configuration and the protocol.
"""
