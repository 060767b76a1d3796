"""Restores the file by which rocksdict knows whether keys and values are bytes alone.

rocksdict writes its ``rocksdict-config.json`` at every opening, in place. If the process is killed meanwhile the file is empty,
and the next opening takes the database for one of bytes, writes that down, and fails. RocksDB's own options, which are replaced
atomically, name the comparator, and databases of other values have one of their own.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Final

from dualwrite.stores.keyed.rocksdb_client__stores_rocksdb_settings import parse

logger = logging.getLogger(__name__)

_NAME: Final = "rocksdict-config.json"
_RAW: Final = {"rocksdict": False, "leveldb.BytewiseComparator": True}


def restore_config(path: Path) -> None:
    """Rewrite the file if it contradicts the database, before that is opened.

    Args:
        path: The database's directory; nobody has it open.
    """
    raw = _raw_of(path)
    found = _read(path / _NAME)
    if raw is None or found.get("raw_mode") is raw:
        return
    partial = path / f"{_NAME}.partial"
    partial.write_text(json.dumps({"prefix_extractors": {}, **found, "raw_mode": raw}), encoding="utf-8")
    partial.replace(path / _NAME)
    logger.info("rewrote %s in %s: a process had died while writing it", _NAME, path)


def _raw_of(path: Path) -> bool | None:
    """Whether keys and values are bytes alone, by RocksDB's newest options; None if they do not say."""
    files = [(int(found[1]), one) for one in path.iterdir() if (found := re.fullmatch(r"OPTIONS-(\d+)", one.name))]
    if not files:
        return None
    newest = max(files)[1].read_text(encoding="utf-8", errors="replace")
    return _RAW.get(parse(newest).get("CFOptions default", {}).get("comparator", ""))


def _read(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
