"""Real servers for tests, yours too: embedded Kafka and PostgreSQL, proxies that misbehave, pytest fixtures.

Install ``dualwrite[testing]``. The fixtures (`dualwrite.testing.plugin`) are known to pytest then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.testing.kafka import EmbeddedKafka
    from dualwrite.testing.postgresql import EmbeddedPostgres
    from dualwrite.testing.proxy_kafka import Api, KafkaProxy
    from dualwrite.testing.proxy_postgresql import PostgresProxy
    from dualwrite.testing.reading import Record, read_committed

__all__ = ["Api", "EmbeddedKafka", "EmbeddedPostgres", "KafkaProxy", "PostgresProxy", "Record", "read_committed"]

_HOMES = {
    "Api": "dualwrite.testing.proxy_kafka",
    "EmbeddedKafka": "dualwrite.testing.kafka",
    "EmbeddedPostgres": "dualwrite.testing.postgresql",
    "KafkaProxy": "dualwrite.testing.proxy_kafka",
    "PostgresProxy": "dualwrite.testing.proxy_postgresql",
    "Record": "dualwrite.testing.reading",
    "read_committed": "dualwrite.testing.reading",
}


def __getattr__(name: str) -> object:
    # pytest imports this package with the plugin, in every project that has it installed: it must cost nothing.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - see above

    return getattr(importlib.import_module(_HOMES[name]), name)
