"""Proxies between a client and a server that lose, delay, repeat and cut what passes.

What belongs here: rules over units of a protocol, and one module for each protocol. May use: ``dualwrite.testing.servers``.
"""
