"""Which row goes to which target, and the settings of one target of several."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.column_types import Form
from dualwrite.sinks.spark.layout import Projected
from dualwrite.sinks.spark.options import SourceOptions, target_options
from dualwrite.sinks.spark.targets import require_all_used, require_different, routed_batches, tag_number

SCHEMA = StructType().add("kind", StringType()).add("id", LongType()).add("extra", LongType())
COMMON = {"sink": "s", "kafka": {"bootstrap.servers": "b"}, "url": "postgresql+psycopg://db/x"}


def target(tag, *columns, table="t"):
    projected = tuple(Projected(number, Form.PLAIN, pa.int64()) for number in columns)
    layout = SimpleNamespace(
        projected=projected,
        json_columns=(),
        table=("public", table),
        whole_row=None,
        arrow_schema=pa.schema([(f"c{place}", pa.int64()) for place in range(len(columns))]),
    )
    return SimpleNamespace(tag=tag, layout=layout, is_quarantine=False, in_table=True)


TARGETS = [target("a", 1), target("b", 1, 2, table="u")]


def rows(*kinds, first=0):
    numbers = list(range(first, first + len(kinds)))
    return pa.RecordBatch.from_pydict({"kind": pa.array(kinds, pa.string()), "id": numbers, "extra": numbers})


def test_each_row_goes_to_the_target_of_its_tag_in_its_order():
    batches = [rows("a", "b", "a", "b"), rows("b", "b", first=4)]
    found = [(number, one.column(0).to_pylist()) for number, one in routed_batches(batches, SCHEMA, TARGETS, 0, 3)]
    assert found == [(0, [0, 2]), (1, [1, 3]), (1, [4, 5])]


@pytest.mark.parametrize(("tag", "words"), [(None, "is null"), ("c", "is 'c'")])
def test_a_tag_of_no_target_is_refused_with_the_rows_number(tag, words):
    batches = [rows("a", "b"), rows("a", tag, first=2)]
    words = rf"the tag column 'kind' {words} \(row 4 of partition 3\), and the targets are 'a', 'b'"
    with pytest.raises(ConfigurationError, match=words):
        list(routed_batches(batches, SCHEMA, TARGETS, 0, 3))


def test_a_column_that_no_target_takes_is_refused():
    require_all_used(SCHEMA, TARGETS, "kind")
    with pytest.raises(ConfigurationError, match="no target takes the DataFrame's column 'extra'"):
        require_all_used(SCHEMA, TARGETS[:1], "kind")


def test_the_tag_column_must_be_there_and_text():
    assert tag_number(SCHEMA, "kind") == 0
    for name, words in (("kinds", "does not have"), ("id", "of type bigint; it must be string")):
        with pytest.raises(ConfigurationError, match=words):
            tag_number(SCHEMA, name)


def test_a_table_may_be_there_once():
    require_different(TARGETS)
    with pytest.raises(ConfigurationError, match="table 't' is the target of two parts"):
        require_different([*TARGETS, target("c", 1)])


def test_a_target_has_its_own_settings_before_the_common_ones():
    common = {**COMMON, "key": "id", "topic": "all"}
    options = target_options(common, {"table": "t", "topic": "own"}, "target 'a'")
    assert (options.table, options.topic, options.key, options.sink) == ("t", "own", "id", "s")
    for given, words in (
        ({"table": "t", "max_slots": 3}, r"target 'a': max_slots \(maxSlots\) is for the batch"),
        ({"table": "t", "tabel": "t"}, "target 'a': there is no setting 'tabel'.*did you mean 'table'"),
        ({}, "target 'a': the setting table is missing"),
        (["table"], "target 'a': its settings must be a mapping"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            target_options(common, given, "target 'a'")


def test_the_options_of_the_format_name_targets():
    given = {"sink": "s", "url": COMMON["url"], "kafka.bootstrap.servers": "b", "keyColumn": "id", "tagColumn": "kind"}
    targets = '{"a": {"dbtable": "t", "topic": "x"}, "b": {"dbTable": "u", "topic": "y", "upsertKeys": ["id"]}}'
    options = SourceOptions.parse({**given, "targets": targets})
    assert options.tag_column == "kind"
    assert [(tag, one.table, one.topic, one.key, one.upsert_keys) for tag, one in options.targets] == [
        ("a", "t", "x", "id", None),
        ("b", "u", "y", "id", ["id"]),
    ]
    with pytest.raises(ConfigurationError, match="the options tagColumn and targets must be given together"):
        SourceOptions.parse({**given, "dbtable": "t", "topic": "x"})
    for targets, words in (
        ('{"a": {"dbtable": "t", "topic": "x"}, "a": {"dbtable": "u", "topic": "y"}}', "option targets has 'a' twice"),
        ('{"a": {"dbtable": "t", "topic": "x", "TOPIC": "y"}}', "target 'a': the option topic is there twice"),
        ('{"a": {"dbtable": "t", "topic": "x", "keyColumn": null}}', "target 'a': the option keyColumn is null"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            SourceOptions.parse({**given, "targets": targets})
