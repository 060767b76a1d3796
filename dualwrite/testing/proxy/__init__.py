"""Proxies between a client and a server: they lose, delay, repeat and cut traffic.

What belongs here: rules over requests and replies, and one module for each wire protocol. May use:
``dualwrite.testing.servers``.
"""
