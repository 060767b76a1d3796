"""Databases other than SQL ones: give one as ``database=`` to writers, consumers and the calls for operators.

A SQL database needs no class: give a SQLAlchemy engine or a URL. Each name loads its client at first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualwrite.stores.keyed.rocksdb import RocksBatch, RocksDatabase
    from dualwrite.stores.keyed.zookeeper import Multi, ZooKeeperDatabase

__all__ = ["Multi", "RocksBatch", "RocksDatabase", "ZooKeeperDatabase"]

_HOMES = {
    "Multi": "dualwrite.stores.keyed.zookeeper",
    "RocksBatch": "dualwrite.stores.keyed.rocksdb",
    "RocksDatabase": "dualwrite.stores.keyed.rocksdb",
    "ZooKeeperDatabase": "dualwrite.stores.keyed.zookeeper",
}


def __getattr__(name: str) -> object:
    """Import a client with the first name that needs it."""
    if name in _HOMES:
        from importlib import import_module  # noqa: PLC0415 - as above

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
