"""The app's entry in Django's registry, and what ``manage.py check`` says of its settings."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import ImproperlyConfigured


class DualwriteConfig(AppConfig):  # type: ignore[misc] # Django ships no types
    """The app ``dualwrite``, by which ``manage.py migrate dualwrite`` knows it."""

    name = "dualwrite.django"
    label = "dualwrite"
    verbose_name = "dualwrite"

    def ready(self) -> None:
        """Register the check. Nothing connects."""
        register(check_settings)


def check_settings(**_: object) -> Sequence[CheckMessage]:
    """Check ``settings.DUALWRITE``. Asks no server."""
    from dualwrite.django.writers import aliases, settings_of  # noqa: PLC0415 - Django's apps must be loaded

    found: list[CheckMessage] = []
    try:
        named = aliases()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="dualwrite.E001")]
    for using in named:
        try:
            settings_of(using)
        except ImproperlyConfigured as error:
            found.append(Error(str(error), id="dualwrite.E001"))
    return found
