"""Sinks: dual writes from data processing engines.

What belongs here: one package for each engine, and what they share. May use: the whole library but ``dualwrite.apps.cli``
and ``dualwrite.testing``.
"""
