"""For your tests: a writer in memory, real servers, misbehaving proxies, journal and checker, fixtures.

Install ``dualwrite[testing]``; pytest then finds the fixtures (`dualwrite.testing.plugin`).

What belongs here: tools that users' tests need as much as ours. May use: everything but ``dualwrite.cli`` and
``dualwrite.sinks``; the library itself never imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dualwrite.errors import extra_missing

if TYPE_CHECKING:
    from dualwrite.protocol.message import ProducerRecord
    from dualwrite.testing.checker import (
        Checker,
        Finding,
        Follower,
        History,
        Journal,
        Kind,
        Record,
        Verdict,
        read_committed,
    )
    from dualwrite.testing.memory.async_writer import AsyncInMemoryWriter
    from dualwrite.testing.memory.lane import Place, RecordedTransaction, TransactionState
    from dualwrite.testing.memory.writer import InMemoryWriter
    from dualwrite.testing.proxy import Api, KafkaProxy, PostgresProxy
    from dualwrite.testing.servers.databases import EmbeddedMariaDB, EmbeddedPostgres, EmbeddedZooKeeper
    from dualwrite.testing.servers.kafka import EmbeddedKafka

__all__ = [
    "Api",
    "AsyncInMemoryWriter",
    "Checker",
    "EmbeddedKafka",
    "EmbeddedMariaDB",
    "EmbeddedPostgres",
    "EmbeddedZooKeeper",
    "Finding",
    "Follower",
    "History",
    "InMemoryWriter",
    "Journal",
    "KafkaProxy",
    "Kind",
    "Place",
    "PostgresProxy",
    "ProducerRecord",
    "Record",
    "RecordedTransaction",
    "TransactionState",
    "Verdict",
    "read_committed",
]

_HOMES = {
    "Api": "dualwrite.testing.proxy",
    "AsyncInMemoryWriter": "dualwrite.testing.memory.async_writer",
    "Checker": "dualwrite.testing.checker",
    "EmbeddedKafka": "dualwrite.testing.servers.kafka",
    "EmbeddedMariaDB": "dualwrite.testing.servers.databases",
    "EmbeddedPostgres": "dualwrite.testing.servers.databases",
    "EmbeddedZooKeeper": "dualwrite.testing.servers.databases",
    "Finding": "dualwrite.testing.checker",
    "Follower": "dualwrite.testing.checker",
    "History": "dualwrite.testing.checker",
    "InMemoryWriter": "dualwrite.testing.memory.writer",
    "Journal": "dualwrite.testing.checker",
    "Kind": "dualwrite.testing.checker",
    "KafkaProxy": "dualwrite.testing.proxy",
    "Place": "dualwrite.testing.memory.lane",
    "PostgresProxy": "dualwrite.testing.proxy",
    "ProducerRecord": "dualwrite.protocol.message",
    "Record": "dualwrite.testing.checker",
    "RecordedTransaction": "dualwrite.testing.memory.lane",
    "TransactionState": "dualwrite.testing.memory.lane",
    "Verdict": "dualwrite.testing.checker",
    "read_committed": "dualwrite.testing.checker",
}


def __getattr__(name: str) -> object:
    # Import lazily: pytest imports this package with the plugin in every project that has it installed.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - see above

    if name == "AsyncInMemoryWriter":
        # If greenlet is missing, the error of this package names the extra; SQLAlchemy's would come first otherwise.
        importlib.import_module("dualwrite.asyncio")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise extra_missing("testing", error) from error
