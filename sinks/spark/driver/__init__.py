"""The driver's work that ``per_partition`` and ``whole_batch`` share.

What belongs here: planning, Spark jobs, and reports of failed jobs.
May use: everything but these two.
"""
