"""Kafka's own tools, in Java, as judges of what stands in a topic."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dualwrite.testing.servers.embedded import fetched_jars, java, kafka_jars
from dualwrite.testing.servers.kafka import JVM_OPTIONS
from harness.patience import PATIENCE_S

NULL = "<null>"
_LOGGING = Path(__file__).parents[3] / "dualwrite" / "testing" / "servers" / "log4j2.xml"


class Consumed(NamedTuple):
    """One message as Java's consumer prints it."""

    partition: int
    timestamp_ms: int
    headers: str
    key: str
    value: str


class Dumped(NamedTuple):
    """One batch as the broker's own code reads it from its log."""

    count: int
    base_sequence: int
    producer_id: int
    epoch: int
    is_transactional: bool
    is_control: bool
    codec: str
    crc: int
    is_valid: bool
    size: int


def consume(config: Mapping[str, str], topic: str, count: int) -> list[Consumed]:
    """The first committed messages of a topic, text without tabs and line breaks, by Java's ``read_committed`` consumer."""
    printed = ["partition", "timestamp", "headers", "key", "value"]
    formatter = [f"print.{name}=true" for name in printed] + [f"null.literal={NULL}"]
    output = _run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        ["--bootstrap-server", config["bootstrap.servers"], "--topic", topic, "--from-beginning"],
        ["--isolation-level", "read_committed", "--max-messages", str(count), "--timeout-ms", str(PATIENCE_S * 1000)],
        *(["--formatter-property", one] for one in formatter),
    )
    found = []
    for line in output.split("\n"):
        if not line.startswith("CreateTime:"):  # the tool's own log
            continue
        created, partition, *rest = line.split("\t")
        found.append(Consumed(int(partition.split(":")[1]), int(created.split(":")[1]), *rest))
    return found


def dump(log: Path) -> tuple[list[Dumped], list[str]]:
    """The batches of a partition's log file, and a line for each record in them."""
    output = _run(
        "org.apache.kafka.tools.DumpLogSegments", ["--deep-iteration", "--print-data-log", "--files", str(log)]
    )
    batches = []
    for line in output.splitlines():
        if line.startswith("baseOffset:"):
            field = dict(re.findall(r"(\w+): (\S+)", line))
            batches.append(
                Dumped(
                    int(field["count"]), int(field["baseSequence"]), int(field["producerId"]), int(field["producerEpoch"]),
                    field["isTransactional"] == "true", field["isControl"] == "true", field["compresscodec"],
                    int(field["crc"]), field["isvalid"] == "true", int(field["size"]),
                )
            )  # fmt: skip
    return batches, [line for line in output.splitlines() if line.startswith("| ")]


def dump_metadata(log: Path) -> list[dict[str, object]]:
    """The records of a log that Kafka's decoder of its own metadata log understands, each as that prints it."""
    output = _run("org.apache.kafka.tools.DumpLogSegments", ["--cluster-metadata-decoder", "--files", str(log)])
    return [json.loads(found) for found in re.findall(r"payload: (\{.*\})$", output, re.MULTILINE)]


def flink_producer(*arguments: str) -> tuple[int, str]:
    """Run ``FlinkProducer.java`` beside this file: its exit code and its result."""
    done = _run_program("FlinkProducer.java", *arguments)
    [result] = _results(done) or [done.stderr]
    return done.returncode, result


def offsets_requests(cases: Sequence[Mapping[str, object]]) -> list[bytes]:
    """Consumed offsets as the Java client sends them, by ``OffsetsRequest.java`` beside this file."""
    done = _run_program("OffsetsRequest.java", given="".join(json.dumps(case) + "\n" for case in cases))
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(result) for result in _results(done)]


def _run_program(source: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [java(), *JVM_OPTIONS, f"-Dlog4j2.configurationFile={_LOGGING}", "-cp", f"{kafka_jars()}/*",
         str(Path(__file__).with_name(source)), *arguments],
        capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=False, input=given,
    )  # fmt: skip


def _results(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it has printed as a result, among its log's lines."""
    return re.findall(r"^result (\S+)$", done.stdout, re.MULTILINE)


def _run(tool: str, *arguments: Iterable[str]) -> str:
    tools = fetched_jars(Path(__file__).with_name("kafka-tools-pom.xml"), "kafka-tools", "Kafka's tools")
    done = subprocess.run(
        [
            java(), *JVM_OPTIONS, "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8",
            f"-Dlog4j2.configurationFile={_LOGGING}", "-cp", f"{kafka_jars()}/*:{tools}/*", tool,
            *(one for group in arguments for one in group),
        ],
        capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
