"""The settings of a sink, from keyword arguments or from Spark's options.

What belongs here: settings and their checks, which run before anything is written.
May use: of the sink only the names of the formats, in ``schemas``.
"""
