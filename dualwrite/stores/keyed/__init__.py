"""The state store of databases without SQL, RocksDB and ZooKeeper, over five primitives on keys and values.

What belongs here: the rules of the rows, once for all such databases, and one chapter for each of them, which alone imports
its driver. May use: the protocol and the interfaces.
"""
