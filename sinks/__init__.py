"""Sinks: dual writes from data processing engines.

What belongs here: one package for each engine. May use: the whole library but ``dualwrite.cli`` and ``dualwrite.testing``.
"""
