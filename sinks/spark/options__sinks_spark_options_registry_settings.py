"""The settings of the schema registry: an allow-list of names, none of which loads code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from dualwrite.errors import ConfigurationError
from dualwrite.sinks.spark.options__sinks_spark_options_near_names import did_you_mean

Setting: TypeAlias = str | int | float

_SECRET: Final = frozenset(
    {"basic.auth.user.info", "bearer.auth.token", "bearer.auth.client.secret", "ssl.key.password"}
)
_TEXTS: Final = _SECRET | {
    "url",
    "bearer.auth.credentials.source",
    "bearer.auth.logical.cluster",
    "bearer.auth.identity.pool.id",
    "bearer.auth.client.id",
    "bearer.auth.scope",
    "bearer.auth.issuer.endpoint.url",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "proxy",
}
_NUMBERS: Final = frozenset({"timeout", "max.retries", "retries.wait.ms", "retries.max.wait.ms"})
_FLAGS: Final = {"auto.register.schemas": True, "use.latest.version": False, "normalize.schemas": False}
_STRATEGY: Final = "subject.name.strategy"
_TOPICS: Final = "topics"
NAMES: Final = (*sorted(_TEXTS), *sorted(_NUMBERS), *_FLAGS, _STRATEGY, _TOPICS)
"""All names that may be set."""
STRATEGIES: Final = ("topic", "record", "topic_record")
_BEARERS: Final = frozenset({"OAUTHBEARER", "OAUTHBEARER_AZURE_IMDS", "STATIC_TOKEN"})
_TIMEOUT_S: Final = 30  # confluent-kafka's own default is to wait forever


@dataclass(frozen=True, repr=False)
class RegistrySettings:
    """The checked settings. Their ``repr`` shows no value.

    Attributes:
        client: For confluent-kafka's ``SchemaRegistryClient``.
        auto_register: Whether the driver registers a schema that its subject does not have.
        use_latest: Whether to write with the subject's latest schema.
        normalize: Whether the registry normalizes schemas.
        strategy: Names of subjects are built from ``topic``, ``record`` or ``topic_record``.
        topics: With a topic column: the topics whose subjects the driver registers or looks up.
    """

    client: Mapping[str, Setting]
    auto_register: bool
    use_latest: bool
    normalize: bool
    strategy: str
    topics: tuple[str, ...]

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> RegistrySettings:
        """Check the settings. Connects nowhere and reads no file.

        Raises:
            ConfigurationError: A setting is unknown or wrong, or ``url`` is missing. The error names it, and shows no value.
        """
        for name in given:
            if name not in NAMES:
                _refuse(name)
        if not given.get("url"):
            raise ConfigurationError(
                "the schema registry's setting url is missing", next_step="give schema.registry.url"
            )
        _check_url(_text("url", given["url"]))
        client: dict[str, Setting] = {name: _text(name, given[name]) for name in sorted(_TEXTS & given.keys())}
        client |= {"timeout": _TIMEOUT_S}
        client |= {name: _number(name, given[name]) for name in sorted(_NUMBERS & given.keys())}
        if client.get("bearer.auth.credentials.source", "STATIC_TOKEN") not in _BEARERS:
            raise ConfigurationError(
                "the schema registry's setting bearer.auth.credentials.source is none of "
                f"{', '.join(sorted(_BEARERS))}: others run code"
            )
        flags = {name: _flag(name, given.get(name, default)) for name, default in _FLAGS.items()}
        if (
            flags["use.latest.version"]
            and given.get("auto.register.schemas") is not None
            and flags["auto.register.schemas"]
        ):
            raise ConfigurationError("use.latest.version and auto.register.schemas cannot be combined")
        strategy = _text(_STRATEGY, given.get(_STRATEGY, "topic")).lower()
        if strategy not in STRATEGIES:
            raise ConfigurationError(f"{_STRATEGY} must be one of {', '.join(STRATEGIES)}")
        topics = given.get(_TOPICS, ())
        listed = topics.split(",") if isinstance(topics, str) else topics
        if not isinstance(listed, (list, tuple)):
            raise ConfigurationError("the schema registry's setting topics must be a list of names, or a,b,c")
        return cls(
            client=client,
            auto_register=flags["auto.register.schemas"] and not flags["use.latest.version"],
            use_latest=flags["use.latest.version"],
            normalize=flags["normalize.schemas"],
            strategy=strategy,
            topics=tuple(str(topic).strip() for topic in listed if str(topic).strip()),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self.client)} settings>)"


def _check_url(text: str) -> None:
    for part in text.split(","):
        if not part.strip().startswith(("http://", "https://", "${env:")):
            raise ConfigurationError("the schema registry's url must begin with http:// or https://")
        if "@" in part:
            # HTTP clients write whole addresses into their logs.
            raise ConfigurationError(
                "the schema registry's url holds a password", next_step="use schema.registry.basic.auth.user.info"
            )


def _refuse(name: str) -> None:
    known = {known_name: known_name for known_name in NAMES}
    every = f"the settings are {', '.join(NAMES)}"
    raise ConfigurationError(
        f"the schema registry has no setting {name!r}", next_step=did_you_mean(name, known, every, cutoff=0.5)
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"the schema registry's setting {name} is not text but {type(value).__name__}")
    return value


def _number(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise ConfigurationError(f"the schema registry's setting {name} must be a number, and not less than 0")
    return int(number) if number.is_integer() else number


def _flag(name: str, value: object) -> bool:
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise ConfigurationError(f"the schema registry's setting {name} must be true or false")
    return text == "true"
