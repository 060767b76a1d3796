"""One dual write: the block that a user works in, its transaction, and how it ends.

What belongs here: what happens between the beginning and the end of one block. May use: lanes, ``dualwrite.recovery``,
the adapters, the ports and the protocol; not the writer.
"""
