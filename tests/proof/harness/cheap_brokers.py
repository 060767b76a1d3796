"""Brokers that take less processor time: what many tests start, stop and ask all the time.

They read the archive of classes, log only warnings (for each new topic a broker writes some twenty lines otherwise), and share what
Kafka's storage tool puts into the directory of a new broker, since a JVM for each of them costs half a second of the processor.

The first broker of each version and settings runs the tool, and so do all with users, and all that are started by processes
without `use`. What it has made is kept in ``.cache`` for the next ones; the ids in ``meta.properties`` are their own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from dualwrite.clock import Deadline
from dualwrite.testing.servers import kafka
from dualwrite.testing.servers.kafka import Broker, render
from harness import class_archive

KEPT: Final = Path(__file__).parents[3] / ".cache" / "formatted"
_OWN: Final = {"node.id", "controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs"}
"""Settings that name a broker, its ports and its directory."""
_format: Final = Broker.format


def use() -> None:
    """Let the brokers that this process starts from now on be so."""
    class_archive.use()
    kafka.JVM_OPTIONS = (*kafka.JVM_OPTIONS, "-Ddualwrite.log=WARN")
    Broker.format = _format_once  # type: ignore[method-assign]


def _format_once(
    self: Broker,
    jars: Path,
    cluster_id: str,
    settings: Mapping[str, str],
    passwords: Mapping[str, str],
    deadline: Deadline,
) -> None:
    same = {key: value for key, value in settings.items() if key not in _OWN}
    if passwords or any(tempfile.gettempdir() in value for value in same.values()):
        _format(self, jars, cluster_id, settings, passwords, deadline)
        return
    key = hashlib.sha256(json.dumps([jars.name, same], sort_keys=True).encode()).hexdigest()[:16]
    kept, data = KEPT / key, self.process.directory / "data"
    if not kept.exists():
        _format(self, jars, cluster_id, settings, passwords, deadline)
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=KEPT))
        shutil.copytree(data, unfinished, dirs_exist_ok=True)
        with suppress(OSError):  # another process was first
            unfinished.rename(kept)
        shutil.rmtree(unfinished, ignore_errors=True)
        return
    (self.process.directory / "server.properties").write_text(render(settings), encoding="utf-8")
    (self.process.directory / "tmp").mkdir()
    shutil.copytree(kept, data)
    ids = {"node.id": settings["node.id"], "cluster.id": cluster_id, "directory.id": _new_id()}
    properties = data / "meta.properties"
    text = properties.read_text(encoding="utf-8")
    for name, value in ids.items():
        text = re.sub(rf"^{re.escape(name)}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
    properties.write_text(text, encoding="utf-8")


def _new_id() -> str:
    """A UUID as Kafka writes them; its own do not begin with a hyphen either."""
    return "D" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
