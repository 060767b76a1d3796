"""Avro, JSON Schema and Protobuf with a schema registry: through every way into the sink, read back by confluent's own."""

import base64
import datetime as dt
import json
import logging
import socket
from decimal import Decimal
from functools import partial

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from harness.messages import consume, message_class, protobuf_file
from harness.schema_registry import deserializer, schema_registry
from harness.spark import ROWS, SPARKS_ERRORS, ArmedTask
from harness.spark import numbers as numbered
from harness.spark_source import options_of
from pyspark.sql.types import StringType, StructField, StructType

from dualwrite import ConfigurationError, Unavailable
from dualwrite.sinks.spark import foreach_batch, foreach_partition, per_partition, register, write_batch
from dualwrite.sinks.spark.options import Format, RegistrySettings
from dualwrite.sinks.spark.registry import latest, registered, task_registry
from dualwrite.sinks.spark.schema_parts import Given, Part, module_of

UTC = dt.timezone.utc
MOMENT = dt.datetime(2013, 7, 1, 12, 0, 0, 123456, UTC)
SECRET = "canary-7f3a91"
WAYS = ("write_batch", "foreach_partition", "data source")
IN_EVERY_RUN = {("avro", "foreach_partition"), ("jsonschema", "write_batch"), ("protobuf", "data source")}

# Name, DataFrame expression, PostgreSQL type; what Avro, JSON Schema and Protobuf say; the Protobuf field.
TYPES = [
    ("flag", "true", "boolean", True, True, True, "optional bool"),
    ("tiny", "-128Y", "smallint", -128, -128, -128, "optional sint32"),
    ("small", "32767S", "smallint", 32767, 32767, 32767, "optional int32"),
    ("n", "cast(-5 as int)", "bigint", -5, -5, -5, "optional int32"),
    ("big", "9223372036854775807L", "bigint", 2**63 - 1, 2**63 - 1, str(2**63 - 1), "optional int64"),
    ("single", "cast(0.5 as float)", "real", 0.5, 0.5, 0.5, "optional float"),
    ("double", "1e300D", "double precision", 1e300, 1e300, 1e300, "optional double"),
    ("price", "cast('-12.30' as decimal(10,2))", "numeric", Decimal("-12.30"), -12.3, "-12.30", "optional string"),
    ("word", "'größer'", "text", "größer", "größer", "größer", "optional string"),
    ("body", "x'00ff'", "bytea", b"\x00\xff", "AP8=", "AP8=", "optional bytes"),
    ("day", "date'2020-02-29'", "date", dt.date(2020, 2, 29), "2020-02-29", "2020-02-29", "optional string"),
    ("at", "timestamp'2013-07-01 12:00:00.123456 UTC'", "timestamptz", MOMENT, "2013-07-01T12:00:00.123456Z",
     "2013-07-01T12:00:00.123456Z", "google.protobuf.Timestamp"),
    ("wall", "timestamp_ntz'1969-12-31 23:59:59.5'", "timestamp", dt.datetime.fromisoformat("1969-12-31T23:59:59.500000"),
     "1969-12-31T23:59:59.500000", "1969-12-31T23:59:59.500000", "optional string"),
    ("list", "array(1, 3)", "integer[]", [1, 3], [1, 3], [1, 3], "repeated int32"),
    ("tags", "map('k', timestamp'2013-07-01 12:00:00.123456 UTC')", "jsonb", {"k": MOMENT},
     {"k": "2013-07-01T12:00:00.123456Z"}, {"k": "2013-07-01T12:00:00.123456Z"}, "map<google.protobuf.Timestamp>"),
    ("place", "named_struct('x', date'2020-01-01', 'z', array(named_struct('m', map('a', 1.5D))))", "jsonb",
     {"x": dt.date(2020, 1, 1), "z": [{"m": {"a": 1.5}}]}, {"x": "2020-01-01", "z": [{"m": {"a": 1.5}}]},
     {"x": "2020-01-01", "z": [{"m": {"a": 1.5}}]}, "Place"),
    ("v", "parse_json('{\"v\": [1]}')", "jsonb", '{"v":[1]}', {"v": [1]}, '{"v":[1]}', "optional string"),
]  # fmt: skip
NAMES = [name for name, *_ in TYPES]
DESCRIPTOR = protobuf_file(
    imports=("google/protobuf/timestamp.proto",),
    Inner={"m": "map<double>"},
    Place={"x": "optional string", "z": "repeated Inner"},
    Row={name: field for name, *_, field in TYPES},
    Key={"id": "optional int64"},
    Number={"id": "optional int64", "name": "optional string"},
)


@pytest.fixture
def registry():
    with schema_registry() as found, SchemaRegistryClient({"url": found.url}) as found.client:
        yield found


def written(df, way, **settings):
    if way == "write_batch":
        write_batch(df, batch_id=way, **settings)
    elif way == "data source":
        register(df.sparkSession)
        df.write.format("dualwrite").mode("append").options(**options_of(settings)).option("batchId", way).save()
    else:
        df.foreachPartition(foreach_partition(df, batch_id=way, **settings))


def with_registry(case, registry, value_format, **more):
    settings = {**case.settings, "value_format": value_format, "schema_registry": {"url": registry.url}}
    if value_format == "protobuf":
        settings |= {"descriptor": DESCRIPTOR, "value_message": "test.Number"}
    return {**settings, **more}


def reader(registry, case, part_format, message="test.Number", field="value"):
    return deserializer(registry.client, part_format, case.topic, field=field, descriptor=DESCRIPTOR, message=message)


def values(case, registry, part_format, message="test.Number"):
    read = reader(registry, case, part_format, message)
    return [read(message.value()) for message in consume(case.kafka, case.topic)]


def untouched(case):
    """Nothing was begun on either side."""
    return (
        case.rows() == []
        and consume(case.kafka, case.topic) == []
        and not case.execute("SELECT * FROM dualwrite_ledger")
        and not case.execute("SELECT * FROM dualwrite_slot")
    )


@pytest.mark.parametrize(
    ("value_format", "way"),
    # The ways differ in how rows come to Arrow, the formats in how they leave it.
    [
        (one, way) if (one, way) in IN_EVERY_RUN else pytest.param(one, way, marks=pytest.mark.thorough)
        for one in ("avro", "jsonschema", "protobuf")
        for way in WAYS
    ],
)
def test_every_type_comes_back_as_it_was(spark, numbers, registry, value_format, way, tmp_path):
    declared = ", ".join(f"{name} {kind}" for name, _, kind, *_ in TYPES)
    numbers.execute(f"CREATE TABLE everything ({declared})")
    full = spark.sql("SELECT " + ", ".join(f"{expression} AS {name}" for name, expression, *_ in TYPES))
    settings = with_registry(numbers, registry, value_format, table="everything", key=None)
    if value_format == "protobuf":
        path = tmp_path / "row.desc"
        path.write_bytes(DESCRIPTOR)
        settings |= {"value_message": "test.Row", "descriptor": str(path)}
        df = full.coalesce(1)  # a null list is refused there: see the unit tests
    else:
        df = full.union(full.selectExpr(*(f"if(flag, null, {name}) AS {name}" for name in NAMES))).coalesce(1)
    written(df, way, **settings)
    answers = dict(zip(("avro", "jsonschema", "protobuf"), range(3, 6), strict=True))
    expected = {row[0]: row[answers[value_format]] for row in TYPES}
    found = sorted(values(numbers, registry, value_format, "test.Row"), key=lambda value: value["flag"] is None)
    assert found[0] == expected
    assert found[1:] == ([] if value_format == "protobuf" else [dict.fromkeys(NAMES)])
    assert len(numbers.execute("SELECT * FROM everything")) == len(found)


@pytest.mark.parametrize("by", ["data source", pytest.param("foreach_batch", marks=pytest.mark.thorough)])
def test_a_stream_in_avro(spark, numbers, registry, tmp_path, by):
    register(spark)
    source = tmp_path / "in"
    numbered(spark, 10, 1).write.parquet(str(source))
    stream = spark.readStream.schema("id long, name string").parquet(str(source)).writeStream
    settings = with_registry(numbers, registry, "avro")
    if by == "foreach_batch":
        stream = stream.foreachBatch(foreach_batch(**settings))
    else:
        stream = stream.format("dualwrite").options(**options_of(settings))
    stream.option("checkpointLocation", str(tmp_path / "a")).trigger(availableNow=True).start().awaitTermination()
    assert sorted(value["id"] for value in values(numbers, registry, "avro")) == [*range(10)]
    assert len(registry.subjects[f"{numbers.topic}-value"]) == 1


@pytest.mark.parametrize(
    ("key_format", "value_format"),
    [
        ("avro", "avro"),
        pytest.param("jsonschema", "protobuf", marks=pytest.mark.thorough),
        ("protobuf", "protobuf"),
    ],
)
def test_keys_have_formats_of_their_own(spark, numbers, registry, key_format, value_format):
    df = numbered(spark, 3, 1)
    changes = {"key_format": key_format, "columns": ["id", "name"]}
    if key_format == "protobuf":
        df = df.selectExpr("*", "if(id = 0, null, named_struct('id', id)) AS k")
        changes |= {"key": "k", "key_message": "test.Key"}
    written(df, "write_batch", **with_registry(numbers, registry, value_format, **changes))
    read = reader(registry, numbers, key_format, "test.Key", "key")
    messages = consume(numbers.kafka, numbers.topic)
    keys = [None if message.key() is None else read(message.key()) for message in messages]
    expected = [None, {"id": "1"}, {"id": "2"}] if key_format == "protobuf" else [0, 1, 2]
    assert sorted(keys, key=str) == sorted(expected, key=str)
    assert sorted(value["name"] for value in values(numbers, registry, value_format)) == ["row 0", "row 1", "row 2"]
    assert registry.subjects.keys() == {f"{numbers.topic}-key", f"{numbers.topic}-value"}


def test_a_column_can_be_the_value_and_null_is_a_tombstone(spark, numbers, registry):
    df = numbered(spark, 2, 1).selectExpr("*", "if(id = 0, null, named_struct('a', id)) AS v")
    written(df, "data source", **with_registry(numbers, registry, "avro", value="v"))
    assert sorted(values(numbers, registry, "avro"), key=lambda value: value is not None) == [None, {"a": 1}]
    assert numbers.rows() == [(0, "row 0"), (1, "row 1")]


def test_rows_with_topics_of_their_own(spark, numbers, registry):
    df = numbered(spark, 4, 1).selectExpr("*", f"'{numbers.topic}' AS t")
    settings = with_registry(numbers, registry, "avro", topic=None, topic_column="t")
    with pytest.raises(SPARKS_ERRORS, match=f"Subject '{numbers.topic}-value' not found.*schema.registry.topics"):
        written(df, "data source", **settings)
    numbers.verify(0)
    settings["schema_registry"]["topics"] = f"{numbers.topic}, another"
    written(df, "data source", **settings)
    assert len(values(numbers, registry, "avro")) == 4
    assert registry.subjects.keys() == {f"{numbers.topic}-value", "another-value"}


@pytest.mark.parametrize("way", ["write_batch", *(pytest.param(way, marks=pytest.mark.thorough) for way in WAYS[1:])])
def test_a_schema_that_the_registry_refuses_fails_before_anything_is_begun(spark, numbers, registry, way):
    earlier = {"type": "record", "name": "numbers", "fields": [{"name": "id", "type": "string"}]}
    registry.register(f"{numbers.topic}-value", json.dumps(earlier))
    with pytest.raises((ConfigurationError, *SPARKS_ERRORS), match="TYPE_MISMATCH of id"):
        written(numbered(spark), way, **with_registry(numbers, registry, "avro"))
    assert untouched(numbers)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("nobody listens", "does not answer", id="nobody listens"),
        pytest.param("it is broken", "returned an unexpected answer: .*503", id="it is broken"),
    ],
)
def test_a_registry_that_does_not_answer_fails_before_anything_is_begun(spark, numbers, registry, how, says):
    settings = {"url": registry.url, "max.retries": 1, "retries.wait.ms": 1}
    if how == "nobody listens":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            settings["url"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
    else:
        registry.broken = 503
    with pytest.raises(Unavailable, match=f"the schema registry {says}"):
        written(numbered(spark), "write_batch", **with_registry(numbers, registry, "avro", schema_registry=settings))
    assert untouched(numbers)


def test_what_the_registry_has_is_enough_where_nothing_may_be_registered(spark, numbers, registry):
    settings = with_registry(numbers, registry, "avro")
    settings["schema_registry"] |= {"auto.register.schemas": "false"}
    with pytest.raises(ConfigurationError, match="not found"):
        written(numbered(spark), "write_batch", **settings)
    assert untouched(numbers)


def test_the_latest_schema_is_written_with(spark, numbers, registry):
    fields = [{"name": "name", "type": "string"}, {"name": "id", "type": "long"},
              {"name": "kind", "type": "string", "default": "plain"}]  # fmt: skip
    schema = json.dumps({"type": "record", "name": "Number", "namespace": "shop", "fields": fields})
    number = registry.register(f"{numbers.topic}-value", schema)
    settings = with_registry(numbers, registry, "avro")
    settings["schema_registry"] |= {"use.latest.version": "true"}
    written(numbered(spark, 3, 1), "data source", **settings)
    assert {"id": 2, "name": "row 2", "kind": "plain"} in values(numbers, registry, "avro")
    assert {message.value()[1:5] for message in consume(numbers.kafka, numbers.topic)} == {number.to_bytes(4, "big")}
    assert len(registry.subjects[f"{numbers.topic}-value"]) == 1


@pytest.mark.parametrize("value_format", ["avro", pytest.param("protobuf", marks=pytest.mark.thorough)])
def test_a_task_that_is_run_again_writes_the_same_id_and_asks_the_registry_nothing(
    spark, numbers, registry, monkeypatch, value_format
):
    monkeypatch.setattr(per_partition, "PartitionTask", partial(ArmedTask, point="spark.rows_copied:1:kill"))
    written(numbered(spark), "write_batch", **with_registry(numbers, registry, value_format))
    messages = consume(numbers.kafka, numbers.topic)
    assert len(messages) == ROWS
    assert len({message.value()[:5] for message in messages}) == 1
    assert registry.asked == [("POST", f"/subjects/{numbers.topic}-value/versions")]


def test_no_secret_shows_in_a_log_or_a_plan(spark, numbers, registry, caplog):
    registry.user_info = f"app:{SECRET}"
    settings = with_registry(numbers, registry, "avro")
    settings["schema_registry"] |= {"basic.auth.user.info": f"app:{SECRET}"}
    with caplog.at_level(logging.DEBUG):
        written(numbered(spark, 3, 1), "data source", **settings)
        written(numbered(spark, 3, 1), "write_batch", **settings)
    registry.user_info = None
    assert len(values(numbers, registry, "avro")) == 6
    # py4j at its most talkative repeats every call of the user's own.
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("py4j")]
    assert any("schema 1, version 1" in text for text in logged)
    assert [
        text for text in logged if SECRET in text or base64.b64encode(f"app:{SECRET}".encode()).decode() in text
    ] == []
    plans = spark._jsparkSession.sharedState().statusStore().executionsList()
    texts = [plans.apply(number).physicalPlanDescription() for number in range(plans.size())]
    assert any("dualwrite" in text.lower() or "MapInArrow" in text for text in texts)
    assert [text for text in texts if SECRET in text] == []
    registry.user_info = "app:changed"
    with pytest.raises(ConfigurationError, match="refuses.*401") as caught:
        write_batch(numbered(spark), batch_id="2", **settings)
    assert SECRET not in str(caught.value)


def test_a_row_that_the_schema_refuses_fails_its_partition_on_both_sides(spark, numbers, registry):
    schema = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 100}, "name": {"type": "string"}}}
    settings = with_registry(numbers, registry, "jsonschema", value_schema=json.dumps(schema))
    with pytest.raises(
        SPARKS_ERRORS,
        match=r"row 102 of partition 0, key '101' does not fit the jsonschema schema of the message's value",
    ):
        written(numbered(spark, 200, 1), "write_batch", **settings)
    numbers.verify(0)


def test_a_message_that_imports_others_is_registered_with_them_and_the_tasks_need_no_registry(registry):
    address = FileDescriptorSet.FromString(protobuf_file("address.proto", Address={"city": "string"}))
    order = FileDescriptorSet.FromString(
        protobuf_file("order.proto", imports=["address.proto"], Order={"to": "Address"})
    )
    del order.file[0].enum_type[:]  # the other file has it
    files = FileDescriptorSet(file=[*address.file, *order.file]).SerializeToString()
    place = StructType([StructField("city", StringType())])
    part = Part("value", "orders", (("to", place),), whole=False)
    schema = module_of(Format.PROTOBUF).plan(part, Given(message="test.Order", descriptor=files))
    settings = RegistrySettings.parse({"url": registry.url, "max.retries": 0})
    known = registered(settings, schema, ["orders"])
    assert {one.subject for one in known} == {"address.proto", "orders-value"}
    registry.broken = 503
    with task_registry(settings, known) as tasks:
        value = tasks.serializer(schema, "orders")({"to": {"city": "Rome"}})
        with pytest.raises(Unavailable):
            tasks.serializer(schema, "elsewhere")
    registry.broken = 0
    read = ProtobufDeserializer(message_class(files, "test.Order"), {}, registry.client)
    assert read(value, SerializationContext("orders", MessageField.VALUE)).to.city == "Rome"


def test_a_latest_schema_that_says_what_is_not_done_is_refused(registry):
    settings = RegistrySettings.parse({"url": registry.url, "use.latest.version": True})
    rules = {"domainRules": [{"name": "r", "kind": "TRANSFORM", "mode": "WRITE", "type": "ENCRYPT"}]}
    registry.register("json-value", '{"type": "object"}', "JSON")
    registry.register("ruled-value", '{"type": "string"}', ruleSet=rules)
    registry.register("referring-value", '"other"', references=[{"name": "other", "subject": "o", "version": 1}])
    for topic, says in (("json", "is JSON, not avro"), ("ruled", "has rules"), ("referring", "refers to others"),
                        ("nowhere", "Subject 'nowhere-value' not found")):  # fmt: skip
        with pytest.raises(ConfigurationError, match=says):
            latest(settings, "value", Format.AVRO, topic)
    with pytest.raises(ConfigurationError, match="is for avro and jsonschema"):
        latest(settings, "value", Format.PROTOBUF, "json")
