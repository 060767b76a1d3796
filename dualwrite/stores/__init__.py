"""State stores: the rows of the protocol in the user's own database, over SQLAlchemy Core.

What belongs here: SQL, and the meaning of a database's answers. May use: the ports and the protocol.
"""
