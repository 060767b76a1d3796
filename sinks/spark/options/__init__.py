"""The settings of a sink, by keyword or by Spark's options.

What belongs here: what users may set, checked before anything is written.
May use: nothing else of the sink but the names of formats.
"""
