"""How a database is reached: engines from URLs, the connection of a block, and what goes wrong there.

What belongs here: what holds for every statement, whatever it says. May use: the tables and the errors.
"""
