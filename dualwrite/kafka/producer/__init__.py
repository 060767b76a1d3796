"""Transactional producers: the verbs that users and the writer call, and an engine below them.

What belongs here: what every engine of a producer shares. May use: ``dualwrite.kafka.coordinator`` and the configuration.
"""
