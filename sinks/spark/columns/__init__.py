"""The mapping from the DataFrame's columns to table and message, and the values to send.

What belongs here: plans made from names and types, and the conversion of Arrow columns and rows.
May use: ``options`` and ``schemas``.
"""
