"""The protocol as a pure core: values and decisions.

What belongs here: functions from observations to the next step, and the values they take. No I/O, no clock, no logging.
May use: the standard library and ``dualwrite.errors``.
"""
