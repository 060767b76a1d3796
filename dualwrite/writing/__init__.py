"""The writer: what a user's block goes through, from a lane to the end of its dual write.

What belongs here: what a process does that owns its ids. May use: ``dualwrite.recovery``, the adapters,
the ports and the protocol.
"""
