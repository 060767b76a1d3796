"""OAUTHBEARER for kafka-python, using the function that confluent-kafka calls for librdkafka's tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kafka.net.sasl.oauth import AbstractTokenProvider

Extensions = Mapping[str, str]
TokenAnswer = tuple[str, float] | tuple[str, float, str, Extensions]
"""The result of ``oauth_cb``: token, expiry in seconds since 1970, and optionally principal and extensions."""

_FRESH_SHARE = 0.8  # of a token's life, as in librdkafka: after that, fetch a new one


class CallbackTokens(AbstractTokenProvider):  # type: ignore[misc] # kafka-python has no types
    """Gives kafka-python the tokens of a confluent-kafka ``oauth_cb``.

    Args:
        callback: The user's function.
        argument: The user's ``sasl.oauthbearer.config``, passed to the function as confluent-kafka does.
    """

    def __init__(self, callback: Callable[[str], TokenAnswer], argument: str) -> None:
        self._callback = callback
        self._argument = argument
        self._lock = threading.Lock()
        self._answer: TokenAnswer | None = None
        self._fresh_until = 0.0

    def token(self) -> str:
        """A token that has not expired. An exception of the user's function makes the connection fail."""
        return self._current()[0]

    def extensions(self) -> dict[str, str]:
        """The SASL extensions that came with the token."""
        answer = self._current()
        return dict(answer[3]) if len(answer) == 4 else {}  # noqa: PLR2004 - the longer form of the answer

    def _current(self) -> TokenAnswer:
        with self._lock:
            now = time.time()
            if self._answer is None or now >= self._fresh_until:
                self._answer = self._callback(self._argument)
                self._fresh_until = now + _FRESH_SHARE * (self._answer[1] - now)
            return self._answer
