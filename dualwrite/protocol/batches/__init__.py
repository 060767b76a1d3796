"""Decisions about a batch that many participants write: whether a run may go on, who works on it, when a part is complete.

What belongs here: rules that no single dual write needs. May use: the rest of the protocol.
"""
