"""RocksDB, by rocksdict, as the database of dual writes: embedded, one process.

What belongs here: opening, settings, the primitives over two column families, ``tx.batch``. May use: what
:mod:`dualwrite.stores.keyed` may use, and rocksdict at run time, for it comes with an extra.
"""
