"""The TOML file of ``dualwrite serve``: its keys, their defaults, and errors that name the line.

A file names one or more *targets*, each a database with the cluster that its writers send to. A password need not stand in it:
``url_env`` names an environment variable, ``kafka_file`` a file of properties. Errors never show a value of these.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from dualwrite.errors import ConfigurationError, nearest
from dualwrite.kafka.config import KafkaConfig
from dualwrite.protocol.blocking import Deed
from dualwrite.protocol.members import check_fleet
from dualwrite.protocol.supervision import Rule
from dualwrite.protocol.values import check_seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLIENT_ID: Final = "dualwrite-serve"
"""Our ``client.id``, or what it begins with: people who read the rows, and later rounds, see who has claimed them."""
_OF_SERVICE: Final = (
    "listen",
    "interval_s",
    "lease_timeout_s",
    "settle_after_s",
    "send_waiting",
    "timeout_s",
    "actions",
    "target",
)
_OF_ACTIONS: Final = ("enabled", "token", "token_env", "user_header", "origin", "trusted_proxies")
_SHORTEST_TOKEN: Final = 16
_OF_TARGET: Final = (
    *("url", "url_env", "schema", "prefix", "settle_after_s", "send_waiting", "timeout_s", "kafka", "kafka_file"),
)
_HIGHEST_PORT: Final = 65535
_ORIGIN: Final = re.compile(r"https?://[^/\s]+")
_HEADER: Final = re.compile(r"\s*\[+([^]]+)]")
_ASSIGNED: Final = re.compile(r"\s*([\w.\"'-]+)\s*=")


def is_ours(owner: str) -> bool:
    """Whether the owner of a row is a supervisor, and so its claim no sign of life."""
    return owner.startswith((f"{CLIENT_ID} ", f"{CLIENT_ID}/"))


def fleet_of(target: str) -> str:
    """The fleet whose one lease the replicas of a target share. No writer may have this name."""
    return f"dualwrite-serve-{target}"


@dataclass(frozen=True)
class Target:
    """One database, and the cluster that its writers send to.

    Attributes:
        name: Its name in the file, in logs, in metrics and on the page.
        url: The database's SQLAlchemy URL.
        kafka: librdkafka configuration, ``client.id`` included.
        schema: The database schema of the library's tables.
        prefix: Only writers whose name begins so; empty for all.
        rule: When a writer is settled.
        timeout_s: Limits each look at the servers, and each settlement.
    """

    name: str
    url: str = field(repr=False)
    kafka: Mapping[str, object] = field(repr=False)
    schema: str | None = None
    prefix: str = ""
    rule: Rule = field(default_factory=Rule)
    timeout_s: float = 60.0


Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"
LOOPBACK: Final[tuple[Network, ...]] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


@dataclass(frozen=True)
class ActionRules:
    """What people may do on the page, and how the page knows who they are: by a token, or by a header that a proxy sets.

    Attributes:
        enabled: What they may do.
        token: Whoever gives it may act, under the name that they give; None with ``user_header``.
        user_header: The header in which a proxy names its user; None with a token.
        origin: The page's own address as browsers see it: forms from elsewhere are refused. None, with a token only: any
            address that the browser's ``Host`` names.
        trusted_proxies: From where ``user_header`` is believed.
    """

    enabled: frozenset[Deed]
    token: str | None = field(default=None, repr=False)
    user_header: str | None = None
    origin: str | None = None
    trusted_proxies: tuple[Network, ...] = LOOPBACK


@dataclass(frozen=True)
class Settings:
    """The whole file.

    Attributes:
        targets: At least one.
        host: The address to listen on.
        port: Its port; 0 for any free one.
        interval_s: At the longest, between two rounds over a target.
        lease_timeout_s: A leading replica without a sign of life for so long is replaced.
        actions: What people may do on the page; None if nothing.
    """

    targets: tuple[Target, ...]
    host: str = "127.0.0.1"
    port: int = 8470
    interval_s: float = 10.0
    lease_timeout_s: float = 30.0
    actions: ActionRules | None = None


def read_settings(path: Path) -> Settings:
    """Read the file.

    Raises:
        ConfigurationError: It cannot be read, or a key of it is wrong; the message has its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}", next_step="give a TOML file in UTF-8") from error
    return parse_settings(text, str(path), directory=path.parent, environment=os.environ)


def parse_settings(text: str, where: str, *, directory: Path, environment: Mapping[str, str]) -> Settings:
    """The settings in a text; ``where`` is its name in errors, and relative paths begin at ``directory``."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where}: {error}", next_step="correct the file: it is not TOML") from error
    top = _Table(document, (), text, where)
    top.refuse_unknown(_OF_SERVICE)
    host, port = _address(top)
    targets = top.table("target")
    if not targets.content:
        raise top.wrong("target", "there is no target", "add a table [target.NAME] for each database")
    return Settings(
        targets=tuple(
            _target(targets.table(name), name, top, directory=directory, environment=environment)
            for name in targets.content
        ),
        host=host,
        port=port,
        interval_s=top.seconds("interval_s", Settings.interval_s),
        lease_timeout_s=top.seconds("lease_timeout_s", Settings.lease_timeout_s),
        actions=_actions(top.table("actions"), environment),
    )


def _actions(table: _Table, environment: Mapping[str, str]) -> ActionRules | None:
    if not table.content:
        return None
    table.refuse_unknown(_OF_ACTIONS)
    known = {deed.value: deed for deed in Deed}
    enabled = table.texts("enabled", ())
    for name in enabled:
        if name not in known:
            raise table.wrong("enabled", f"there is no action {name!r}", f"the actions are {', '.join(known)}")
    token = _secret(table, "token", environment)
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise table.wrong("token", f"it is shorter than {_SHORTEST_TOKEN} characters", "use `openssl rand -hex 24`")
    header, origin = table.text("user_header"), table.text("origin")
    if (token is None) == (header is None):
        raise table.wrong(
            "enabled",
            "there must be exactly one of a token and user_header",
            "set token_env, or user_header and origin",
        )
    if header is not None and origin is None:
        raise table.wrong(
            "user_header",
            "the proxy's own address is missing",
            'set origin to what browsers show, for example "https://dualwrite.example.com"',
        )
    if origin is not None and not _ORIGIN.fullmatch(origin):
        raise table.wrong(
            "origin", f"{origin!r} is no origin", 'give "https://HOST" or "https://HOST:PORT", without a path'
        )
    return ActionRules(
        enabled=frozenset(known[name] for name in enabled),
        token=token,
        user_header=header,
        origin=origin,
        trusted_proxies=tuple(_networks(table)),
    )


def _networks(table: _Table) -> Iterator[Network]:
    if "trusted_proxies" not in table.content:
        yield from LOOPBACK
    for one in table.texts("trusted_proxies", ()):
        try:
            yield ipaddress.ip_network(one)
        except ValueError as error:
            raise table.wrong(
                "trusted_proxies", str(error), 'give addresses or networks, such as "10.0.0.0/8"'
            ) from error


def _secret(table: _Table, key: str, environment: Mapping[str, str]) -> str | None:
    """A text of the file, or of the environment variable that ``<key>_env`` names; None if there is neither."""
    given, variable = table.text(key), table.text(f"{key}_env")
    if given is not None and variable is not None:
        raise table.wrong(key, f"there are both {key} and {key}_env", "keep one of them")
    if variable is None:
        return given
    found = environment.get(variable)
    if not found:
        raise table.wrong(f"{key}_env", f"the environment variable {variable} is empty or not set", "set it")
    return found


def _target(table: _Table, name: str, top: _Table, *, directory: Path, environment: Mapping[str, str]) -> Target:
    table.refuse_unknown(_OF_TARGET)
    try:
        check_fleet(fleet_of(name))
    except ConfigurationError as error:
        raise top.wrong("target", f"{name!r} cannot be the name of a target", "use a short one without '#'") from error
    standard = Rule()
    url, variable = table.text("url"), table.text("url_env")
    if (url is None) == (variable is None):
        raise table.wrong(
            "url", "there must be exactly one of url and url_env", "url_env names a variable with the URL"
        )
    if variable is not None:
        url = environment.get(variable)
        if not url:
            raise table.wrong(
                "url_env", f"the environment variable {variable} is empty or not set", "set it to the URL"
            )
    assert url is not None
    return Target(
        name=name,
        url=url,
        kafka=_kafka(table, directory),
        schema=table.text("schema"),
        prefix=table.text("prefix") or "",
        rule=Rule(
            settle_after_s=table.seconds("settle_after_s", top.seconds("settle_after_s", standard.settle_after_s)),
            sends_waiting=table.flag("send_waiting", default=top.flag("send_waiting", default=standard.sends_waiting)),
        ),
        timeout_s=table.seconds("timeout_s", top.seconds("timeout_s", Target.timeout_s)),
    )


def _kafka(table: _Table, directory: Path) -> Mapping[str, object]:
    kafka: dict[str, object] = {}
    if (file := table.text("kafka_file")) is not None:
        kafka.update(_properties(table, directory / file))
    kafka.update(_flat(table.table("kafka").content))
    # A file that is shared with the writers may name them: a live one must never pass for one of us.
    kafka["client.id"] = f"{CLIENT_ID}/{kafka['client.id']}" if "client.id" in kafka else CLIENT_ID
    if "bootstrap.servers" not in kafka:
        raise table.wrong("kafka", "there are no bootstrap.servers", "set them in its table kafka, or in kafka_file")
    try:
        KafkaConfig.parse(kafka)
    except ConfigurationError as error:
        raise table.wrong("kafka", error.what, error.next_step or "") from error
    return kafka


def _properties(table: _Table, path: Path) -> Iterator[tuple[str, str]]:
    """The properties of a file, ``key=value`` in each line. No error shows a value."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise table.wrong("kafka_file", f"cannot read {path}: {error}", "give a file of properties") from error
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.strip().startswith("#"):
            key, equals, value = line.partition("=")
            if not equals or not key.strip():
                raise table.wrong("kafka_file", f"{path}, line {number} is not key=value", "correct it")
            yield key.strip(), value.strip()


def _flat(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    """``bootstrap.servers = "..."`` without quotes is a table in a table. It means the key with the dot."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _address(top: _Table) -> tuple[str, int]:
    text = top.text("listen")
    if text is None:
        return Settings.host, Settings.port
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > _HIGHEST_PORT:
        raise top.wrong("listen", f"{text!r} is no address", 'give "HOST:PORT", for example "127.0.0.1:8470"')
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class _Table:
    """One table of the document, which knows where it stands in the text."""

    content: Mapping[str, object]
    path: tuple[str, ...]
    document: str = field(repr=False)
    where: str

    def wrong(self, key: str, what: str, next_step: str) -> ConfigurationError:
        line = line_of(self.document, self.path, key)
        at = self.where if line is None else f"{self.where}, line {line}"
        return ConfigurationError(f"{at}: {'.'.join((*self.path, key))}: {what}", next_step=next_step)

    def refuse_unknown(self, known: tuple[str, ...]) -> None:
        for key in self.content:
            if key not in known:
                meant = nearest(key, known)
                advice = f"did you mean {meant}?" if meant else f"the keys here are {', '.join(known)}"
                raise self.wrong(key, "there is no such key", advice)

    def table(self, key: str) -> _Table:
        found = self.content.get(key, {})
        if not isinstance(found, dict):
            raise self.wrong(key, "this is no table", f"write [{'.'.join((*self.path, key))}]")
        return _Table(found, (*self.path, key), self.document, self.where)

    def text(self, key: str) -> str | None:
        found = self.content.get(key)
        if found is not None and (not isinstance(found, str) or not found):
            raise self.wrong(key, "this is no text, or an empty one", "give a text in quotes, or leave the key out")
        return found

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        found = self.content.get(key, default)
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, str) and one for one in found):
            raise self.wrong(key, "this is no list of texts", 'write ["one", "two"]')
        return tuple(found)

    def flag(self, key: str, *, default: bool) -> bool:
        found = self.content.get(key, default)
        if not isinstance(found, bool):
            raise self.wrong(key, "this is neither true nor false", "give true or false, without quotes")
        return found

    def seconds(self, key: str, default: float) -> float:
        found = self.content.get(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise self.wrong(key, "this is no number", "give seconds, without quotes")
        try:
            check_seconds(key, found)
        except ConfigurationError as error:
            raise self.wrong(key, f"{found:g} s cannot be used", error.next_step or "") from error
        return float(found)


def line_of(document: str, path: tuple[str, ...], key: str) -> int | None:
    """The line of a key in a document, or else that of the table it should be in; None if neither has a line of its own.

    TOML's parser keeps no lines. This finds keys as people write them, each in a line of its own below the header of its table.
    """
    table: tuple[str, ...] = ()
    of_table = None
    for number, line in enumerate(document.splitlines(), start=1):
        if (header := _HEADER.match(line)) is not None:
            table = _names(header[1])
            if table == (*path, key):
                return number
            if table == path:
                of_table = number
        elif (assigned := _ASSIGNED.match(line)) is not None and (*table, *_names(assigned[1]))[: len(path) + 1] == (
            *path,
            key,
        ):
            return number
    return of_table


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(name.strip().strip("\"'") for name in dotted.split("."))
