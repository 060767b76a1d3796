"""State stores: the rows of the protocol in the user's own database, through SQLAlchemy Core, RocksDB or ZooKeeper.

What belongs here: the statements and requests to databases, and the meaning of their answers. May use: the ports and the
protocol.
"""
