"""The configuration of every client: one set of settings, given once, for librdkafka and for our own connections.

Users give librdkafka's names. What the protocol sets itself is refused, what only one client understands is kept from
the others, and a name that no client knows is an error, not a silent difference.

A key for security that only one client understands would let the other connect differently, and perhaps less safely: it is
refused. Most others concern the producer alone and are not looked at.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast, get_args

from dualwrite.errors import ConfigurationError, nearest
from dualwrite.kafka.connection import ConnectionSettings, server_of
from dualwrite.kafka.messages import Client
from dualwrite.protocol.prepared_state import Engine

KEYS: Final = frozenset(
    {
        "enable.ssl.certificate.verification",
        "ssl.endpoint.identification.algorithm",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.crl.location",
        "ssl.cipher.suites",
    }
)

_TRUE, _FALSE = frozenset({"true", "t", "1"}), frozenset({"false", "f", "0"})


def check(settings: Mapping[str, str]) -> None:
    """Refuse contradictory settings, without reading a file."""
    for kind in ("ca", "certificate", "key"):
        if f"ssl.{kind}.location" in settings and f"ssl.{kind}.pem" in settings:
            raise ConfigurationError(f"Kafka settings 'ssl.{kind}.location' and 'ssl.{kind}.pem': give one of the two")
    certificate, key = (
        any(f"ssl.{kind}.{form}" in settings for form in ("location", "pem")) for kind in ("certificate", "key")
    )
    if certificate != key:
        missing = "ssl.key.location" if certificate else "ssl.certificate.location"
        raise ConfigurationError(f"Kafka setting {missing!r} is missing: a client certificate needs its key")
    if settings.get("ssl.endpoint.identification.algorithm", "https") not in {"https", "none"}:
        raise ConfigurationError("Kafka setting 'ssl.endpoint.identification.algorithm' is not https or none")
    if settings.get("enable.ssl.certificate.verification", "true").lower() not in _TRUE | _FALSE:
        raise ConfigurationError("Kafka setting 'enable.ssl.certificate.verification' is not true or false")


Setting = str | int | float | Callable[..., object]
"""A value as confluent-kafka takes it. librdkafka gets True and False as ``true`` and ``false``."""

FAMILIES: Final = {"any": socket.AF_UNSPEC, "v4": socket.AF_INET, "v6": socket.AF_INET6}
PROTOCOLS: Final = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
PASSWORD_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
MECHANISMS: Final = (*PASSWORD_MECHANISMS, "OAUTHBEARER", "GSSAPI")

_ALIASES: Final = {
    "metadata.broker.list": "bootstrap.servers",
    "sasl.mechanisms": "sasl.mechanism",
    "request.required.acks": "acks",
}

_FIXED: Final[dict[str, tuple[frozenset[str], str]]] = {
    "transactional.id": (frozenset(), "the id is given to the writer or the producer, not in this dictionary"),
    "enable.idempotence": (frozenset({"true"}), "a transaction needs idempotence"),
    "acks": (frozenset({"all", "-1"}), "a transaction needs the acknowledgement of all replicas in sync"),
    "enable.gapless.guarantee": (frozenset({"false"}), "a failed message aborts its transaction anyway"),
    "delivery.report.only.error": (frozenset(), "this library counts the deliveries"),
    "on_delivery": (frozenset(), "give the callback to produce()"),
    "dr_cb": (frozenset(), "give a delivery callback to produce()"),
    "default.topic.config": (frozenset(), "put its keys into the dictionary itself"),
    "test.mock.num.brokers": (frozenset(), "the other client would not see the mock cluster"),
}
"""Keys that the protocol decides: the values that change nothing, and why no other value is allowed."""

_REFUSED: Final = {
    "ssl.keystore.location": "convert it to PEM and use ssl.certificate.location and ssl.key.location",
    "ssl.keystore.password": "convert the key store to PEM and use ssl.certificate.location and ssl.key.location",
    "ssl.ca.certificate.stores": "use ssl.ca.location",
    "ssl.engine.id": "use ssl.key.location: Python's ssl cannot use a key that an OpenSSL engine holds",
    "ssl.engine.location": "use ssl.key.location: Python's ssl cannot use a key that an OpenSSL engine holds",
    "ssl.providers": "leave it out: Python's ssl cannot load OpenSSL providers",
    "ssl.curves.list": "set the curves at the brokers: Python's ssl cannot choose them",
    "ssl.sigalgs.list": "set the signature algorithms at the brokers: Python's ssl cannot choose them",
    "sasl.jaas.config": "that is a Java client's key: use sasl.username and sasl.password",
    "sasl.oauthbearer.method": "give a function oauth_cb that fetches the token: both clients call it",
    "enable.sasl.oauthbearer.unsecure.jwt": "give a function oauth_cb that makes the token: both clients call it",
}
"""Keys that only librdkafka understands, or that users of other clients expect, and what to do instead."""

KERBEROS_TICKETS: Final = frozenset(
    {
        "sasl.kerberos.principal",
        "sasl.kerberos.keytab",
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.min.time.before.relogin",
    }
)
"""Keys by which librdkafka fetches Kerberos tickets. This library's own connections fetch none."""
CONNECTING: Final = KEYS | {
    "security.protocol",
    "sasl.mechanism",
    "sasl.username",
    "sasl.password",
    "oauth_cb",
    "sasl.oauthbearer.config",
    "sasl.kerberos.service.name",
    "bootstrap.servers",
    "broker.address.family",
    "client.dns.lookup",
    "client.id",
    "connections.max.idle.ms",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
}
_SECURITY_FAMILY: Final = re.compile(r"(enable[._])?(ssl|sasl|security|https?|oauth|oauthbearer)[._]")

# librdkafka loads the first as code, and renders the others into a shell command.
_EXECUTABLE: Final = frozenset(
    {
        "plugin.library.paths",
        "sasl.kerberos.kinit.cmd",
        "sasl.kerberos.principal",
        "sasl.kerberos.keytab",
        "sasl.kerberos.service.name",
    }
)

EngineName: TypeAlias = Literal["auto", "native", "librdkafka"]
"""The engines that a user may ask for; ``auto`` is native wherever the cluster allows it."""
ENGINE: Final = "dualwrite.engine"
"""Which engine sends the messages: see `TransactionalProducer`."""
BULK: Final = "dualwrite.bulk"
"""Whether transactions are large: less work for each message, and no ``on_delivery``."""
TWO_PHASE_COMMIT: Final = "transaction.two.phase.commit.enable"
"""KIP-939's setting of clients, under the name that Java's have. librdkafka does not know it."""
MAX_INT: Final = 2**31 - 1
"""The greatest number that librdkafka takes."""
_NUMBERS: Final = {
    "retry.backoff.ms": (1, 300_000),
    "retry.backoff.max.ms": (1, 300_000),
    "transaction.timeout.ms": (1000, MAX_INT),
    "message.max.bytes": (1000, 1_000_000_000),
    "socket.timeout.ms": (10, 300_000),
    "socket.connection.setup.timeout.ms": (1000, MAX_INT),
    "socket.send.buffer.bytes": (0, 100_000_000),
    "socket.receive.buffer.bytes": (0, 100_000_000),
    "connections.max.idle.ms": (0, MAX_INT),
    "reconnect.backoff.ms": (0, 3_600_000),
    "reconnect.backoff.max.ms": (0, 3_600_000),
}
"""Numbers that this library reads, with librdkafka's bounds."""


def wanted_engine(name: str) -> Engine | None:
    """The engine of that name; None for ``auto``."""
    if name not in get_args(EngineName):
        raise ConfigurationError(f"there is no producer engine {name!r}", next_step="choose auto, native or librdkafka")
    return None if name == "auto" else Engine(name)


def wants_bulk(kafka: Mapping[str, object]) -> bool:
    """Whether these settings, which may have no others, ask for large transactions."""
    bulk = str(kafka.get(BULK, "false")).lower()
    if bulk not in {"true", "false"}:
        raise ConfigurationError(f"Kafka setting {BULK!r} is not true or false")
    return bulk == "true"


def checked(kafka: Mapping[str, object], *, trusted: bool) -> dict[str, Setting]:
    """The settings of a dictionary, under the names that this library uses; see :meth:`KafkaConfig.parse`."""
    settings: dict[str, Setting] = {}
    for given, value in kafka.items():
        key = _checked_key(given)
        if not trusted and (key in _EXECUTABLE or callable(value)):
            raise ConfigurationError(f"Kafka setting {key!r} runs code: it cannot be set from here")
        found = _checked_value(key, value)
        if settings.setdefault(key, found) != found:
            raise ConfigurationError(f"Kafka setting {key!r} is given by two names with different values")
    _check_servers(settings)
    _check_protocol(settings)
    _check_two_phase_commit(settings)
    check({key: str(value) for key, value in settings.items() if key in KEYS})
    return settings


def nearest_setting(given: str, known: Iterable[str]) -> str | None:
    """The known setting that a misspelt one may mean."""
    return nearest(given.lower(), known, cutoff=0.88)


def resolved(key: str) -> str:
    """The name that this library uses for a setting: librdkafka has two for some."""
    return _ALIASES.get(key, key)


def _checked_key(given: object) -> str:
    if not isinstance(given, str):
        raise ConfigurationError(f"the name of a Kafka setting is not text but {type(given).__name__}")
    key = resolved(given)
    if key in _REFUSED:
        raise ConfigurationError(f"Kafka setting {given!r} cannot reach both Kafka clients", next_step=_REFUSED[key])
    if _SECURITY_FAMILY.match(key) and key not in CONNECTING | KERBEROS_TICKETS:
        meant = nearest_setting(key, CONNECTING | KERBEROS_TICKETS)
        raise ConfigurationError(
            f"Kafka setting {given!r} concerns security and is not known to this library, so it cannot reach both clients",
            next_step="leave it out, or check its spelling" if meant is None else f"did you mean {meant!r}?",
        )
    return key


def _checked_value(key: str, value: object) -> Setting:
    if not isinstance(value, (str, int, float)) and not callable(value):
        raise ConfigurationError(f"Kafka setting {key!r} is not text or a number but {type(value).__name__}")
    if isinstance(value, bool):
        value = "true" if value else "false"
    if key == "sasl.mechanism":
        value = str(value).upper()
    if key in _FIXED and str(value).lower() not in _FIXED[key][0]:
        raise ConfigurationError(f"Kafka setting {key!r} is this library's own", next_step=_FIXED[key][1])
    if key in _NUMBERS:
        least, most = _NUMBERS[key]
        if not re.fullmatch(r"[0-9]{1,10}", str(value)) or not least <= int(str(value)) <= most:
            raise ConfigurationError(f"Kafka setting {key!r} is not a whole number from {least} to {most}")
    return value


def protocol_of(settings: Mapping[str, Setting]) -> str:
    """How the brokers are reached, in lower case."""
    return str(settings.get("security.protocol", "plaintext")).lower()


def _check_servers(settings: Mapping[str, Setting]) -> None:
    servers = str(settings.get("bootstrap.servers", "")).split(",")
    if not all(re.fullmatch(r"\s*(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+)(:[0-9]{1,5})?\s*", server) for server in servers):
        misspelt = None if "bootstrap.servers" in settings else nearest_setting("bootstrap.servers", settings)
        raise ConfigurationError(
            "Kafka setting 'bootstrap.servers' is missing, or not of the form host:port,host:port",
            next_step=None if misspelt is None else f"is it what {misspelt!r} means?",
        )
    if settings.get("client.dns.lookup") not in {None, "use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"}:
        raise ConfigurationError("Kafka setting 'client.dns.lookup' has a value that the two clients do not both know")
    if settings.get("broker.address.family", "any") not in FAMILIES:
        raise ConfigurationError(f"Kafka setting 'broker.address.family' is not one of {', '.join(FAMILIES)}")


def _check_two_phase_commit(settings: Mapping[str, Setting]) -> None:
    value = str(settings.get(TWO_PHASE_COMMIT, "false")).lower()
    if value not in {"true", "false"}:
        raise ConfigurationError(f"Kafka setting {TWO_PHASE_COMMIT!r} is not true or false")
    if value == "true" and "transaction.timeout.ms" in settings:
        raise ConfigurationError(
            f"Kafka setting 'transaction.timeout.ms' has no effect together with {TWO_PHASE_COMMIT!r}",  # as KIP-939 has it
            next_step="leave one of them out: under two-phase commit a transaction has no time limit",
        )


def _check_protocol(settings: Mapping[str, Setting]) -> None:
    protocol = protocol_of(settings)
    if protocol not in PROTOCOLS:
        raise ConfigurationError(f"Kafka setting 'security.protocol' is not one of {', '.join(PROTOCOLS)}")
    for family in ("ssl", "sasl"):
        idle = [key for key in settings if key.startswith(f"{family}.") and family not in protocol]
        if idle:
            raise ConfigurationError(
                f"Kafka setting {idle[0]!r} would have no effect: security.protocol is {protocol}",
                next_step="set security.protocol, or leave the key out",
            )
    if "sasl" not in protocol:
        return
    mechanism = settings.get("sasl.mechanism")
    if mechanism not in MECHANISMS:
        raise ConfigurationError(f"Kafka setting 'sasl.mechanism' is missing, or not one of {', '.join(MECHANISMS)}")
    needed: dict[object, tuple[str, ...]] = {"OAUTHBEARER": ("oauth_cb",), "GSSAPI": ()}
    for key in needed.get(mechanism, ("sasl.username", "sasl.password")):
        if settings.get(key) in {None, ""}:
            raise ConfigurationError(f"Kafka setting {key!r} is missing: {mechanism} needs it")


# One configuration dictionary, in librdkafka's terms, for two Kafka clients.
#
# librdkafka is one client; this library's own connections are the other. Settings for security and for reaching the
# brokers mean the same to both (`dualwrite.kafka.config`). Everything else concerns the producer and goes to
# librdkafka unchanged.
#
# librdkafka alone fetches the Kerberos ticket; both clients then use the process's ticket cache.

_SHOWN: Final = KEYS - {"ssl.key.password", "ssl.key.pem", "ssl.certificate.pem", "ssl.ca.pem"} | {
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
    engine: EngineName = "auto"
    bulk: bool = False

    @classmethod
    def parse(cls, kafka: Mapping[str, object], *, trusted: bool = True) -> KafkaConfig:
        """Check a dictionary such as confluent-kafka's ``Producer`` takes, and this library's own two settings in it.

        Makes no connection and reads no file.

        ``trusted`` accepts keys that load or execute code: pass False for the options of a job.

        `ConfigurationError` if a key is missing, unknown, contradicts another key or the protocol, or cannot mean the same
        to both clients. It names the key and shows no value.
        """
        settings = checked({key: kafka[key] for key in kafka if key not in {ENGINE, BULK}}, trusted=trusted)
        engine = str(kafka.get(ENGINE, "auto"))
        wanted_engine(engine)
        bulk = wants_bulk(kafka)
        in_order = tuple(sorted(settings.items(), key=lambda item: item[0]))
        return cls(in_order, cast("EngineName", engine), bulk)

    def __repr__(self) -> str:
        shown = [f"{key}={value!r}" if key in _SHOWN else f"{key}=***" for key, value in self._settings]
        shown += [f"{ENGINE}={self.engine!r}"] * (self.engine != "auto") + [f"{BULK}=True"] * self.bulk
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
        """The dictionary for confluent-kafka's ``Producer``, with the caller's own settings.

        The user may have set none of these to another value but ``transaction.timeout.ms``: the caller has already taken
        the user's value into account.
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

    def connecting(self) -> ConnectionSettings:
        """The settings of this library's own connections. Reads certificates and keys from their files.

        `ConfigurationError` if a file cannot be read, a key does not match its certificate, or a package that the SASL
        mechanism needs is missing.
        """
        settings = dict(self._settings)
        protocol, tls, login = protocol_of(settings), None, None
        if protocol != "plaintext":
            from dualwrite.kafka import security  # noqa: PLC0415 - many connections need neither TLS nor a login

            tls = security.context({k: str(v) for k, v in self._settings if k in KEYS}) if "ssl" in protocol else None
            login = security.login(settings) if "sasl" in protocol else None
        opening_s = (self._number("socket.connection.setup.timeout.ms") or 10_000) / 1000
        return ConnectionSettings(
            servers=[server_of(server) for server in self._text("bootstrap.servers").split(",")],
            client=Client(self._text("client.id", "dualwrite")),
            canonical_names=self.get("client.dns.lookup") == "resolve_canonical_bootstrap_servers_only",
            family=FAMILIES[self._text("broker.address.family", "any")],
            socket_options=self._socket_options(),
            tls=tls,
            sasl=login,
            request_s=min(self._number("socket.timeout.ms") or 30_000, 30_000) / 1000,
            opening_s=opening_s,
            longest_opening_s=max(opening_s, 30.0),
            # Short by default: callers wait, up to a deadline, for a broker to come back.
            pause_s=(self._number("reconnect.backoff.ms") or 20) / 1000,
            longest_pause_s=(self._number("reconnect.backoff.max.ms") or 500) / 1000,
            idle_s=(self._number("connections.max.idle.ms") or 540_000) / 1000,
        )

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
