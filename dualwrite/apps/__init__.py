"""Parts that applications build on the writer, so that they need not write these themselves.

What belongs here: loops and conveniences over ``DualWriter``, and its form for event loops; no rule of the protocol. May use:
``dualwrite.writing`` and everything below it.
"""
