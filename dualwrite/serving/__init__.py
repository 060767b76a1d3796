"""``dualwrite serve``: keeps every writer of its databases settled, and shows it. Needs the extra ``serve``.

What belongs here: rounds over the databases, the service's file of settings, its pages. What to do with a writer is decided in
:mod:`dualwrite.protocol.supervision`, and done by :mod:`dualwrite.writing.left_behind`. May use: all of these floors, and the
documents of :mod:`dualwrite.cli.report`.
"""
