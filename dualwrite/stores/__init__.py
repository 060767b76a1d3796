"""State stores: the rows of the protocol in the user's own database, over SQLAlchemy Core.

What belongs here: SQL, and what a database's answers mean. May use: the ports and the protocol.
"""
