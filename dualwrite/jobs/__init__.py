"""Recipes for an engine that writes one batch by many participants.

What belongs here: recipes over many transactions at once. May use: the ports, the protocol and ``dualwrite.recovery``.
"""
