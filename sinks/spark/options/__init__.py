"""The settings of a sink, from keyword arguments or from Spark's options.

What belongs here: settings and their checks, which run before anything is written.
May use: nothing else of the sink.
"""
