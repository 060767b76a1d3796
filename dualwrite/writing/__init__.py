"""The writer: takes a user's block from a lane to the end of its dual write.

What belongs here: the work of a process that owns its ids. May use: ``dualwrite.recovery``, the adapters, the interfaces and
the protocol.
"""
