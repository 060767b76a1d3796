"""Django's migrations of the library's tables: each takes the tables to a revision of ``dualwrite.migrations``.

What belongs here: one file for each release that has changed the tables, and nothing that says what a table looks like.
May use: ``dualwrite.django.tables``.
"""
