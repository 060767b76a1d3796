"""RocksDB, by rocksdict: what all users of one share.

What belongs here: opening a RocksDB, and what its refusals mean. May use: rocksdict at run time, for it comes with an extra.
"""
