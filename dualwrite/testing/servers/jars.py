"""Fetches jars, such as the broker's, once with Maven into the user's cache; also servers that come packed in one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dualwrite.errors import ConfigurationError, Unavailable

POM = Path(__file__).with_name("pom.xml")
CACHE_VARIABLE = "DUALWRITE_CACHE"
KAFKA_VARIABLE = "DUALWRITE_KAFKA_VERSION"
_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+){1,3}(-[A-Za-z0-9.]+)?")


def cache_directory() -> Path:
    """The directory for fetched files: ``DUALWRITE_CACHE``, else ``dualwrite`` in the user's cache directory."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dualwrite"


def java() -> str:
    """The ``java`` program: ``JAVA_HOME``'s, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    return _program(f"{home}/bin/java" if home else "java", "a Java runtime, 17 or newer (JAVA_HOME or PATH)")


def _program(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ConfigurationError(
            f"the embedded servers need {what}: {name!r} was not found",
            next_step="install it, or name servers of your own by DUALWRITE_TEST_KAFKA, DUALWRITE_TEST_ZOOKEEPER and "
            "DUALWRITE_TEST_MARIADB",
        )
    return found


def kafka_jars(pom: Path = POM, version: str | None = None) -> Path:
    """The directory that holds the broker's jars; see :func:`fetched_jars`.

    The version is the given one, else that of ``DUALWRITE_KAFKA_VERSION``, else that of the `pom`.
    """
    return fetched_jars(pom, "kafka", "Apache Kafka", version=version or os.environ.get(KAFKA_VARIABLE))


def fetched_jars(
    pom: Path,
    prefix: str,
    what: str,
    unpack: Callable[[Path], None] | None = None,
    *,
    version: str | None = None,
) -> Path:
    """The directory with the jars that a ``pom.xml`` names; fetches them first if they are not in the cache.

    Several processes may ask at once: one fetches, the others wait. No process sees a half-fetched directory: `unpack` is
    called once, with the directory of the jars just fetched, before anybody else can see it. The cache has one directory for
    each content of `pom`, whose first dependency has the version of the product `what`, unless another `version` is given.
    """
    content = pom.read_bytes()
    own = ET.fromstring(content).findtext("{*}dependencies/{*}dependency/{*}version", "unknown")
    if version is None:
        version = own
    elif _VERSION.fullmatch(version) is None:
        raise ConfigurationError(f"{version!r} is not a version of {what}", next_step="write it as 4.4.0")
    content = content.replace(f"<version>{own}</version>".encode(), f"<version>{version}</version>".encode(), 1)
    cache = cache_directory()
    target = cache / f"{prefix}-{version}-{hashlib.sha256(content).hexdigest()[:12]}"
    if target.is_dir():
        return target
    java()
    maven = _program("mvn", "Apache Maven, once, to fetch its jars")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{target.name}.lock").open("w") as lock:
        _lock(lock.fileno(), target)
        if not target.is_dir():  # another process may have fetched them while we waited
            _fetch(maven, content, f"{what} {version}", target, unpack)
    return target


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _say(f"waiting for another process to fetch {target.name}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _fetch(maven: str, pom: bytes, what: str, target: Path, unpack: Callable[[Path], None] | None) -> None:
    for stale in target.parent.glob(f"{target.name}.partial-*"):  # we hold the lock: its owner was killed
        shutil.rmtree(stale)
    _say(f"fetching {what} with Maven, once, into {target}")
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    (partial / "pom.xml").write_bytes(pom)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={partial}", "-DincludeScope=runtime"]
    command = [maven, "--batch-mode", "--file", str(partial / "pom.xml"), *goal]
    output: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        fetched = 0
        for line in process.stdout:
            output.append(line)
            if "Downloaded from" in line:
                fetched += 1
                if fetched % 20 == 0:
                    _say(f"  {fetched} files")
    if process.returncode != 0:
        shutil.rmtree(partial)
        raise Unavailable(
            f"Maven could not fetch {what}:\n{''.join(output[-20:])}",
            next_step="see Maven's own message above; it reads the user's Maven settings",
        )
    if unpack is not None:
        unpack(partial)
    partial.chmod(0o755)
    partial.rename(target)
    _say(f"fetched {what}")


def _say(text: str) -> None:
    sys.stderr.write(f"dualwrite: {text}\n")
    sys.stderr.flush()
