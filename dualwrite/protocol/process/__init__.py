"""Decisions of a writing process about itself: its time, retries, groups, savepoints, lease and health.

What belongs here: rules for which no state of a transaction must be known. May use: the errors, the names and the tables
of states.
"""
