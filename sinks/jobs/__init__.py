"""Recipes for engines whose batches are written by many participants.

What belongs here: recipes that span many transactions. May use: the ports, the protocol and ``dualwrite.recovery``.
"""
