"""The protocol as a pure core: values and decisions.

What belongs here: a function from what was seen to the next step, and the values it speaks of. No I/O, no clock, no logging.
May use: the standard library and ``dualwrite.errors``.
"""
