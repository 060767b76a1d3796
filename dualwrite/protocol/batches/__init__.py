"""Decisions about batches of many participants: may a run continue, does a process work on it, is a part complete.

What belongs here: rules that a single dual write does not need. May use: the rest of the protocol.
"""
