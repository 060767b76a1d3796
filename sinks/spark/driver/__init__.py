"""The driver's work that both ways of writing a batch share.

What belongs here: planning, Spark jobs, and how a failed job is reported.
May use: everything but the two ways.
"""
