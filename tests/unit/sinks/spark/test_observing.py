"""The names of what a batch was read from, of what the ledger keeps."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("openlineage", reason="the extra 'openlineage' is not installed")

from dualwrite import ConfigurationError
from dualwrite.sinks.spark.observing import BatchLineage, inputs_of
from dualwrite.sinks.spark.options import SinkOptions


def names(sources, kafka=None):
    text = sources if isinstance(sources, str) or sources is None else json.dumps(sources)
    return [(one.namespace, one.name) for one in inputs_of(text, kafka)]


def test_files_are_named_by_their_directory_without_partitions():
    files = [
        "file:///data/a%20b/day=1/x.parquet",
        "file:///data/a%20b/day=2/hour=3/y.parquet",
        "s3a://lake/t/z.parquet",
    ]
    assert names([{"files": files, "file_count": 3}]) == [("file", "/data/a b"), ("s3://lake", "t")]
    assert names([{"files": ["hdfs://n:8020/t/z.parquet"]}]) == [("hdfs://n:8020", "/t")]


def test_streams_of_files_and_of_delta_are_named_by_their_place():
    sources = [{"source": "FileStreamSource[file:/data/in]", "end": {"logOffset": 1}},
               {"source": "DeltaSource[s3a://lake/events]", "end": {"reservoirVersion": 4}}]  # fmt: skip
    assert names(sources) == [("file", "/data/in"), ("s3://lake", "events")]


def test_topics_are_named_if_their_cluster_is_known():
    sources = [{"source": "KafkaV2[Subscribe[a]]", "start": None, "end": {"a": {"0": 17}, "b": {"0": 1}}}]
    assert names(sources) == []
    assert names(sources, "k-1:9092,k-2:9092") == [("kafka://k-1:9092", "a"), ("kafka://k-1:9092", "b")]


@pytest.mark.parametrize("sources", [None, "by hand", "3", '["x"]'])
def test_what_is_not_spark_s_names_nothing(sources):
    assert names(sources, "k:9092") == []


def test_a_cluster_without_a_namespace_is_refused():
    with pytest.raises(ConfigurationError, match="lineageNamespace"):
        SinkOptions(
            sink="s", kafka={}, url="postgresql+psycopg://db/shop", table="t", topic="t", lineage_kafka="k:9092"
        )


def test_a_directory_named_openlineage_is_not_taken_for_the_client(tmp_path, monkeypatch):
    (tmp_path / "openlineage").mkdir()  # as one beside a notebook, with the client's configuration
    others = [one for one in sys.path if not (Path(one) / "openlineage").exists()]
    monkeypatch.setattr("sys.path", [str(tmp_path), *others])
    for name in [one for one in sys.modules if one.partition(".")[0] == "openlineage"]:
        monkeypatch.delitem(sys.modules, name)
    settings = {"kafka": {}, "url": "postgresql+psycopg://db/shop", "table": "t", "topic": "t"}
    options = SinkOptions(sink="s", **settings, lineage_namespace="prod")
    with pytest.raises(ConfigurationError, match="not installed"):
        BatchLineage(options, streaming=False)
