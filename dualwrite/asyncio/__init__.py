"""Above the writer, for applications and operators: its form for event loops, the consumer, the command line.

What belongs here: loops and conveniences over ``DualWriter``, commands over recovery; no rule of the protocol. May use:
``dualwrite.writing`` and everything below it.
"""
