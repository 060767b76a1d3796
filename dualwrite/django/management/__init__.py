"""Where Django looks for commands.

What belongs here: a class for each command of ``manage.py``, over those of ``dualwrite.cli``. May use: ``dualwrite.cli`` and
``dualwrite.django``.
"""
