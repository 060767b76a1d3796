"""One configuration dictionary, in librdkafka's terms, for two Kafka clients.

librdkafka produces; kafka-python talks to the coordinator. Settings for security and for reaching the brokers mean the same
to both (:mod:`dualwrite.kafka.config`). Everything else concerns the producer and goes to librdkafka unchanged.

librdkafka alone fetches the Kerberos ticket; both clients then use the process's ticket cache.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast

from dualwrite.errors import ConfigurationError
from dualwrite.kafka import security
from dualwrite.kafka.config import (
    MAX_INT,
    PASSWORD_MECHANISMS,
    TWO_PHASE_COMMIT,
    Setting,
    checked,
    protocol_of,
    resolved,
)
from dualwrite.kafka.security__kafka_oauth import CallbackTokens, TokenAnswer
from dualwrite.kafka.sockets import address_of

_SHOWN: Final = security.KEYS - {"ssl.key.password", "ssl.key.pem", "ssl.certificate.pem", "ssl.ca.pem"} | {
    "bootstrap.servers",
    "client.id",
    "security.protocol",
    "sasl.mechanism",
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "transaction.timeout.ms",
    "transaction.two.phase.commit.enable",
}
"""The only keys whose values ``repr`` shows: nothing lists the names of all secrets, such as those of plugins."""

_DEFAULT_RETRY_BACKOFF_MS: Final = 1000
_DEFAULT_MAX_MESSAGE_BYTES: Final = 1_000_000


@dataclass(frozen=True, repr=False)
class KafkaConfig:
    """A checked configuration; make one with :meth:`parse`.

    Pickling includes secrets: another process needs them to connect. Its ``repr`` and this library's errors show none.
    """

    _settings: tuple[tuple[str, Setting], ...]

    @classmethod
    def parse(cls, kafka: Mapping[str, object], *, trusted: bool = True) -> KafkaConfig:
        """Check a dictionary such as confluent-kafka's ``Producer`` takes. Makes no connection and reads no file.

        Args:
            kafka: librdkafka's keys and values.
            trusted: Whether to accept keys that load or execute code. Pass False for the options of a job.

        Raises:
            ConfigurationError: A key is missing, unknown, contradicts another key or the protocol, or cannot mean the
                same to both clients. The message names the key and shows no value.
        """
        settings = checked(kafka, trusted=trusted)
        return cls(tuple(sorted(settings.items(), key=lambda item: item[0])))

    def __repr__(self) -> str:
        shown = (f"{key}={value!r}" if key in _SHOWN else f"{key}=***" for key, value in self._settings)
        return f"{type(self).__name__}({', '.join(shown)})"

    def get(self, key: str) -> Setting | None:
        """The user's value under that name or its alias; None if not set."""
        return dict(self._settings).get(resolved(key))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the user's settings, sorted; aliases that this library resolves under their other name."""
        return tuple(key for key, _ in self._settings)

    @property
    def listener(self) -> tuple[str, str]:
        """The bootstrap servers and the protocol: they decide which of their addresses the brokers tell."""
        return self._text("bootstrap.servers"), protocol_of(dict(self._settings))

    @property
    def transaction_timeout_ms(self) -> int | None:
        """The user's own ``transaction.timeout.ms``; None lets the library choose."""
        return self._number("transaction.timeout.ms")

    @property
    def two_phase_commit(self) -> bool | None:
        """Whether the user requires KIP-939's two-phase commit, or forbids it; None lets the library choose."""
        value = self.get(TWO_PHASE_COMMIT)
        return None if value is None else str(value).lower() == "true"

    @property
    def silent_retry_after_s(self) -> float:
        """The least time before librdkafka silently resends a failed request: a call faster than this was sent once.

        Its first wait is 0.8 to 1.2 times ``retry.backoff.ms``, and never more than ``retry.backoff.max.ms``.
        """
        return 0.8 * min(self._retry_backoff_ms()) / 1000

    @property
    def max_message_bytes(self) -> int:
        """The largest message that librdkafka takes: ``message.max.bytes``."""
        return self._number("message.max.bytes") or _DEFAULT_MAX_MESSAGE_BYTES

    def _retry_backoff_ms(self) -> tuple[int, int]:
        first, longest = self._number("retry.backoff.ms"), self._number("retry.backoff.max.ms")
        if first is None:
            first = min(_DEFAULT_RETRY_BACKOFF_MS, longest or _DEFAULT_RETRY_BACKOFF_MS)
        return first, longest or max(first, _DEFAULT_RETRY_BACKOFF_MS)

    def librdkafka(self, **own: Setting) -> dict[str, Setting]:
        """The dictionary for confluent-kafka's ``Producer``.

        Args:
            own: Settings of the caller, as in ``config.librdkafka(**{"transactional.id": "orders"})``.

        Raises:
            ConfigurationError: The user set one of these keys to another value. Only ``transaction.timeout.ms`` may
                differ: the caller has already taken the user's value into account.
        """
        first, longest = self._retry_backoff_ms()
        merged: dict[str, Setting] = {
            "retry.backoff.ms": first,
            "retry.backoff.max.ms": longest,
            **{key: value for key, value in self._settings if key != TWO_PHASE_COMMIT},
        }
        for key, given in own.items():
            value = "true" if given is True else "false" if given is False else given
            if merged.get(key, value) != value and key != "transaction.timeout.ms":
                raise ConfigurationError(f"Kafka setting {key!r} is set by this library: leave it out")
            merged[key] = value
        return merged

    @property
    def client_id(self) -> str | None:
        """The name that the user has given to the client; None without one."""
        return self._text("client.id", "") or None

    def kafka_python(self) -> dict[str, object]:
        """The arguments for kafka-python's connections. Reads certificates and keys from their files.

        Raises:
            ConfigurationError: A file cannot be read, a key does not match its certificate, or a package that the SASL
                mechanism needs is missing.
        """
        setup_ms = self._number("socket.connection.setup.timeout.ms") or 10_000
        arguments: dict[str, object] = {
            "bootstrap_servers": [server.strip() for server in self._text("bootstrap.servers").split(",")],
            "client_id": self._text("client.id", "dualwrite"),
            "client_dns_lookup": self._text("client.dns.lookup", "use_all_dns_ips"),
            "security_protocol": protocol_of(dict(self._settings)).upper(),
            "request_timeout_ms": min(self._number("socket.timeout.ms") or 30_000, 30_000),
            "socket_connection_setup_timeout_ms": setup_ms,
            "socket_connection_setup_timeout_max_ms": max(setup_ms, 30_000),
            "connections_max_idle_ms": self._number("connections.max.idle.ms") or 540_000,
            # Short by default: callers wait, up to a deadline, for a broker to come back.
            "reconnect_backoff_ms": self._number("reconnect.backoff.ms") or 20,
            "reconnect_backoff_max_ms": self._number("reconnect.backoff.max.ms") or 500,
            "receive_message_max_bytes": MAX_INT,  # the largest batch of a log must fit: the broker limits it
            "socket_options": self._socket_options(),
            "proxy_url": address_of(self._text("broker.address.family", "any")),
        }
        if "ssl" in protocol_of(dict(self._settings)):
            arguments["ssl_context"] = security.context({k: str(v) for k, v in self._settings if k in security.KEYS})
        if "sasl" in protocol_of(dict(self._settings)):
            arguments |= self._sasl()
        return arguments

    def _sasl(self) -> dict[str, object]:
        mechanism = self._text("sasl.mechanism")
        arguments: dict[str, object] = {"sasl_mechanism": mechanism}
        if mechanism in PASSWORD_MECHANISMS:
            name = self._text("sasl.username")
            if mechanism != "PLAIN":  # librdkafka escapes these two as RFC 5802 says, kafka-python does not
                name = name.replace("=", "=3D").replace(",", "=2C")
            arguments |= {"sasl_plain_username": name, "sasl_plain_password": self._text("sasl.password")}
        elif mechanism == "OAUTHBEARER":
            callback = cast("Callable[[str], TokenAnswer]", self.get("oauth_cb"))
            arguments["sasl_oauth_token_provider"] = CallbackTokens(callback, self._text("sasl.oauthbearer.config", ""))
        else:
            if importlib.util.find_spec("gssapi") is None:
                raise ConfigurationError(
                    "Kafka setting 'sasl.mechanism' is GSSAPI, which needs the Python package gssapi",
                    next_step="install it in every process that uses this library",
                )
            arguments["sasl_kerberos_service_name"] = self._text("sasl.kerberos.service.name", "kafka")
        return arguments

    def _socket_options(self) -> list[tuple[int, int, int]]:
        keep_alive = str(self.get("socket.keepalive.enable") or "true").lower() in {"true", "t", "1"}
        options = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(keep_alive)),
        ]
        for key, option in (
            ("socket.send.buffer.bytes", socket.SO_SNDBUF),
            ("socket.receive.buffer.bytes", socket.SO_RCVBUF),
        ):
            size = self._number(key)
            if size:
                options.append((socket.SOL_SOCKET, option, size))
        return options

    def _text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        return default if value is None else str(value)

    def _number(self, key: str) -> int | None:
        value = self.get(key)
        return None if value is None else int(str(value))
