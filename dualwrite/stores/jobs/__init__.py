"""The rows of batches that many participants write: slots, the ledger, runs.

What belongs here: SQL that no single dual write needs. May use: the store's tables and its short transactions.
"""
