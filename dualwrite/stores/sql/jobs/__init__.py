"""The rows of batches that many participants write: slots, the ledger, runs.

What belongs here: SQL that a single dual write does not need. May use: the store's tables and its short transactions.
"""
