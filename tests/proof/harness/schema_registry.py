"""A small schema registry over HTTP, for tests: subjects, versions, ids, and the compatibility of flat Avro records."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from harness.messages import message_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka.schema_registry import SchemaRegistryClient


class SchemaRegistry:
    """A schema registry for tests: remembers schemas, and the requests that it got."""

    def __init__(self, url: str):
        self.url = url
        self.subjects: dict[str, list[dict]] = {}
        self.ids: dict[tuple[str, str, str], int] = {}
        self.asked: list[tuple[str, str]] = []
        self.user_info = None
        self.broken = 0
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, authorization: str | None, body: dict | None) -> tuple[int, dict]:
        with self._lock:
            self.asked.append((method, path))
            if self.broken:
                return self.broken, {"error_code": self.broken * 100, "message": "broken"}
            if self.user_info is not None:
                expected = f"Basic {base64.b64encode(self.user_info.encode()).decode()}"
                if authorization != expected:
                    return 401, {"error_code": 401, "message": "Unauthorized"}
            match [method, *(unquote(part) for part in path.strip("/").split("/"))]:
                case ["POST", "subjects", subject, "versions"]:
                    return self._register(subject, body)
                case ["POST", "subjects", subject]:
                    return self._lookup(subject, body)
                case ["GET", "subjects", subject, "versions", version]:
                    return self._version(subject, version)
                case ["GET", "schemas", "ids", number]:
                    found = [one for versions in self.subjects.values() for one in versions if one["id"] == int(number)]
                    return (200, found[0]) if found else (404, {"error_code": 40403, "message": "Schema not found"})
            return 404, {"error_code": 404, "message": f"not served here: {method} {path}"}

    def register(self, subject: str, schema: str, kind: str = "AVRO", **more) -> int:
        """As another client would."""
        status, answer = self._register(subject, {"schema": schema, "schemaType": kind, **more})
        assert status == 200, answer
        return answer["id"]

    def _register(self, subject, body):
        known = self._lookup(subject, body)
        if known[0] == 200:
            return known
        versions = self.subjects.setdefault(subject, [])
        kind = body.get("schemaType") or "AVRO"
        if versions and kind == "AVRO" and (clash := _clash(versions[-1]["schema"], body["schema"])):
            return 409, {"error_code": 409, "message": f"Schema being registered is incompatible: {clash}"}
        content = (kind, body["schema"], json.dumps(body.get("references") or []))
        number = self.ids.setdefault(content, len(self.ids) + 1)
        versions.append({**body, "schemaType": kind, "subject": subject, "version": len(versions) + 1, "id": number})
        return 200, versions[-1]

    def _lookup(self, subject, body):
        if subject not in self.subjects:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        for one in self.subjects[subject]:
            if one["schema"] == body["schema"]:
                return 200, one
        return 404, {"error_code": 40403, "message": f"Schema not found under subject '{subject}'"}

    def _version(self, subject, version):
        versions = self.subjects.get(subject)
        if not versions:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        return 200, versions[-1 if version == "latest" else int(version) - 1]


def _clash(old: str, new: str) -> str | None:
    """Why records of the old schema could not be read with the new one."""
    before, after = json.loads(old), json.loads(new)
    if "fields" not in before or "fields" not in after:
        return None if before == after else "another type"
    known = {field["name"]: field["type"] for field in before["fields"]}
    for field in after["fields"]:
        if field["name"] in known and field["type"] != known[field["name"]]:
            return f"TYPE_MISMATCH of {field['name']}"
        if field["name"] not in known and "default" not in field:
            return f"READER_FIELD_MISSING_DEFAULT_VALUE of {field['name']}"
    return None


@contextmanager
def schema_registry():
    """One that runs until the block ends, in threads of this process."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = urlsplit(self.path).path
            status, answer = found.answer(self.command, path, self.headers.get("Authorization"), body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _serve  # noqa: N815 - the names that http.server calls

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = SchemaRegistry(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="schema registry", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def deserializer(
    client: SchemaRegistryClient, part_format: str, topic: str, *, field: str = "value", descriptor: bytes, message: str
) -> Callable[[bytes], object]:
    """What a consumer with confluent's own deserializers reads of a key or value; a Protobuf message as a dictionary."""
    from confluent_kafka.schema_registry.avro import AvroDeserializer
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
    from confluent_kafka.serialization import SerializationContext
    from google.protobuf.json_format import MessageToDict

    context = SerializationContext(topic, field)
    if part_format == "avro":
        read = AvroDeserializer(client)
    elif part_format == "jsonschema":
        read = JSONDeserializer(None, schema_registry_client=client)
    else:
        parse = ProtobufDeserializer(message_class(descriptor, message), {}, client)
        return lambda data: MessageToDict(parse(data, context), preserving_proto_field_name=True)
    return lambda data: read(data, context)
