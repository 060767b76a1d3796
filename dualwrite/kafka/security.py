"""TLS and logins: the same files and options must mean the same to every client, tokens for OAUTHBEARER included.

Loaded where a connection is encrypted or logs in. What the settings may be is checked in :mod:`dualwrite.kafka.config`.
"""

from __future__ import annotations

import importlib.util
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.connection import Login, Sasl

_TRUE: Final = frozenset({"true", "t", "1"})


def context(settings: Mapping[str, str]) -> ssl.SSLContext:
    """The context that verifies brokers and presents our certificate as librdkafka does with the same settings.

    `ConfigurationError` if a file cannot be read, is not PEM, or a key does not match its certificate or password.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    verified = settings.get("enable.ssl.certificate.verification", "true").lower() in _TRUE
    made.check_hostname = verified and settings.get("ssl.endpoint.identification.algorithm", "https") == "https"
    made.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
    _load_authorities(made, settings)
    if "ssl.crl.location" in settings:
        with _naming("ssl.crl.location"):
            made.load_verify_locations(cafile=settings["ssl.crl.location"])
        made.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if "ssl.cipher.suites" in settings:
        with _naming("ssl.cipher.suites"):
            made.set_ciphers(settings["ssl.cipher.suites"])
    if _source(settings, "certificate") is not None:
        _load_own_certificate(made, settings)
    return made


def _source(settings: Mapping[str, str], kind: str) -> str | None:
    return next((key for key in (f"ssl.{kind}.location", f"ssl.{kind}.pem") if key in settings), None)


def _load_authorities(made: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    location = settings.get("ssl.ca.location", "probe")
    if "ssl.ca.pem" in settings:
        with _naming("ssl.ca.pem"):
            made.load_verify_locations(cadata=settings["ssl.ca.pem"])
    elif location == "probe":  # librdkafka's name for the system's store, and its default
        made.load_default_certs()
    else:
        with _naming("ssl.ca.location"):
            directory = Path(location).is_dir()
            made.load_verify_locations(cafile=None if directory else location, capath=location if directory else None)


def _load_own_certificate(made: ssl.SSLContext, settings: Mapping[str, str]) -> None:
    def missing_password() -> str:
        # Without a callback OpenSSL would ask for the password on the terminal.
        raise ConfigurationError("Kafka setting 'ssl.key.password' is missing: the client's key is encrypted")

    password = settings.get("ssl.key.password", missing_password)
    with (
        _naming(f"{_source(settings, 'certificate')}' and '{_source(settings, 'key')}"),
        _file(settings, "certificate") as certificate,
        _file(settings, "key") as key,
    ):
        made.load_cert_chain(certificate, key, password)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as error:
        reason = getattr(error, "reason", None) or error.args[-1]  # some errors lack the attribute
        raise ConfigurationError(f"Kafka setting '{key}' cannot be used: {reason}") from error
    except OSError as error:
        raise ConfigurationError(f"Kafka setting '{key}': the file cannot be read: {error.strerror}") from error


@contextmanager
def _file(settings: Mapping[str, str], kind: str) -> Iterator[str]:
    """A path to the setting's PEM: Python's ``ssl`` takes certificates and keys from files only."""
    if f"ssl.{kind}.location" in settings:
        yield settings[f"ssl.{kind}.location"]
        return
    pem = settings[f"ssl.{kind}.pem"].encode()
    if hasattr(os, "memfd_create"):  # a key given in memory stays off the disk, even if this process is killed now
        descriptor = os.memfd_create("pem")
        try:
            os.write(descriptor, pem)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            yield file.name


Extensions = Mapping[str, str]
TokenAnswer = tuple[str, float] | tuple[str, float, str, Extensions]
"""The result of ``oauth_cb``: token, expiry in seconds since 1970, and optionally principal and extensions."""

_FRESH_SHARE = 0.8  # of a token's life, as in librdkafka: after that, fetch a new one


def login(settings: Mapping[str, object]) -> Sasl:
    """How to log in with these settings, which were checked.

    `ConfigurationError` if a package is missing that the mechanism needs.
    """
    mechanism = str(settings["sasl.mechanism"])
    if mechanism == "OAUTHBEARER":
        callback = cast("Callable[[str], TokenAnswer]", settings["oauth_cb"])
        tokens = CallbackTokens(callback, str(settings.get("sasl.oauthbearer.config", "")))
        return _by(mechanism, sasl_oauth_token_provider=tokens)
    if mechanism == "GSSAPI":
        if importlib.util.find_spec("gssapi") is None:
            raise ConfigurationError(
                "Kafka setting 'sasl.mechanism' is GSSAPI, which needs the Python package gssapi",
                next_step="install it in every process that uses this library",
            )
        return _by(mechanism, sasl_kerberos_service_name=str(settings.get("sasl.kerberos.service.name", "kafka")))
    name = str(settings["sasl.username"])
    if mechanism != "PLAIN":  # librdkafka escapes these two as RFC 5802 says, kafka-python's mechanism does not
        name = name.replace("=", "=3D").replace(",", "=2C")
    return _by(mechanism, sasl_plain_username=name, sasl_plain_password=str(settings["sasl.password"]))


def _by(mechanism: str, **settings: object) -> Sasl:
    """By kafka-python's mechanism of that name and its settings."""

    def begin(host: str) -> Login:
        from dualwrite.kafka import kafka_python  # noqa: PLC0415 - loads kafka-python, which most connections do not need

        kafka_python.take_tokens(CallbackTokens)
        return kafka_python.begin_login(mechanism, host, settings)

    return Sasl(mechanism, begin)


class CallbackTokens:
    """Gives kafka-python's mechanism the tokens of a confluent-kafka ``oauth_cb``.

    The function gets the user's ``sasl.oauthbearer.config``, as from confluent-kafka.
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
