"""Several tables and topics in one batch: all of them or none, whatever dies, and refused before a task runs if they do not fit."""

import json
import signal
from functools import partial

import pytest
from harness.databases import BOTH_DATABASES, by_way_on_both_databases
from harness.drivers import Drivers
from harness.spark import SPARKS_ERRORS, stopped_at
from harness.spark_source import LEGS, ArmedSource, nothing_is_left, options_of
from pyspark.sql import functions

from dualwrite import ConfigurationError, TransactionAborted
from dualwrite.sinks.spark import JobFailed, foreach_many, register, write_many
from dualwrite.testing.checker import read_committed

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ORDERS = 40
ITEMS = 3 * ORDERS
TAG = {"tag_column": "kind"}


class Shop:
    """The sink of a case with two tables, of which one refers to the other, and a topic for each."""

    def __init__(self, case, kafka):
        self.case = case
        self.topics = [kafka.create_topic(f"{case.topic}-{name}", partitions=2) for name in ("orders", "items")]
        case.execute("CREATE TABLE orders (order_id bigint PRIMARY KEY, customer varchar(99) NOT NULL)")
        case.execute(
            "CREATE TABLE items (order_id bigint REFERENCES orders (order_id), item bigint, price int CHECK (price >= 0), "
            "PRIMARY KEY (order_id, item), FOREIGN KEY (order_id) REFERENCES orders (order_id))"
        )
        self.common = {key: value for key, value in case.settings.items() if key not in {"table", "topic", "key"}}
        self.orders = {"table": "orders", "topic": self.topics[0], "key": "order_id"}
        self.items = {"table": "items", "topic": self.topics[1], "key": "order_id"}
        self.targets = {"order": self.orders, "item": self.items}

    def parts(self, spark, bad=-1):
        rows = tagged(spark, bad)
        orders = rows.where("kind = 'order'").select("order_id", "customer")
        return [(orders, self.orders), (rows.where("kind = 'item'").select("order_id", "item", "price"), self.items)]

    def options(self, **more):
        settings = {key: value for key, value in self.common.items() if value is not None}
        given = {**options_of(settings), "tagColumn": "kind", "keyColumn": "order_id"}
        targets = {"order": {"dbtable": "orders", "topic": self.topics[0]},
                   "item": {"dbtable": "items", "topic": self.topics[1]}}  # fmt: skip
        return {**given, "targets": json.dumps(targets), **more}

    def write(self, df, source="dualwrite", **more):
        df.write.format(source).mode("append").options(**self.options(**more)).save()

    def table_counts(self):
        return [self.case.execute(f"SELECT count(*) FROM {table}")[0][0] for table in ("orders", "items")]

    def counts(self):
        """Orders and items, in the tables and in the topics."""
        return self.table_counts() + [len(list(read_committed(self.case.kafka, topic))) for topic in self.topics]

    def verify(self):
        assert self.case.execute("SELECT order_id, customer FROM orders ORDER BY 1") == [
            (number, f"customer {number}") for number in range(ORDERS)
        ]
        items = self.case.execute("SELECT order_id, item, price FROM items ORDER BY 1, 2")
        assert items == [(number // 3, number % 3, number) for number in range(ITEMS)]
        orders, found = ([json.loads(one.value) for one in read_committed(self.case.kafka, t)] for t in self.topics)
        assert sorted(one["order_id"] for one in orders) == list(range(ORDERS))
        assert all(one.keys() == {"order_id", "customer"} for one in orders)
        assert sorted((one["order_id"], one["item"], one["price"]) for one in found) == items
        nothing_is_left(self.case)


def tagged(spark, bad=-1, partitions=3):
    """Orders, each followed by its items; the item `bad` has a price that its table refuses."""
    rows = spark.range(0, 4 * ORDERS, 1, partitions)
    order, place = functions.expr("id div 4"), functions.expr("id % 4")
    number = order * 3 + place - 1
    price = functions.when(number == bad, -1).otherwise(number).cast("int")
    return rows.select(
        functions.when(place == 0, "order").otherwise("item").alias("kind"),
        order.alias("order_id"),
        functions.when(place == 0, functions.concat(functions.lit("customer "), order)).alias("customer"),
        functions.when(place > 0, place - 1).alias("item"),
        functions.when(place > 0, price).alias("price"),
    )


@pytest.fixture
def shop(spark, numbers, dualwrite_kafka):
    register(spark)
    spark.dataSource.register(ArmedSource)
    return Shop(numbers, dualwrite_kafka)


@BOTH_DATABASES
def test_orders_and_items_are_written_once_and_the_report_tells(spark, shop):
    write = partial(write_many, batch_id="1", **shop.common)
    # The decision finds it; on MariaDB the task, whose staging table has the check of a column.
    with pytest.raises((TransactionAborted, JobFailed), match=r"'items' does not take the (batch|rows).*row \d+ of"):
        write(shop.parts(spark, bad=70))
    assert shop.counts() == [0, 0, 0, 0]
    nothing_is_left(shop.case)
    report = write(shop.parts(spark))
    assert (report.rows, report.written_rows, report.partitions) == (ORDERS + ITEMS, ORDERS + ITEMS, 6)
    assert report.written_by_table == {"orders": ORDERS, "items": ITEMS}
    shop.verify()
    again = write(tagged(spark), **TAG, targets=shop.targets)
    assert (again.rows, again.written_rows, again.written_by_table) == (ORDERS + ITEMS, 0, {"orders": 0, "items": 0})
    shop.verify()
    with pytest.raises(ConfigurationError, match="was (written|begun)"):
        write(shop.parts(spark)[:1])


@BOTH_DATABASES
def test_a_tag_says_where_each_row_goes(spark, shop):
    report = write_many(tagged(spark), batch_id="1", **TAG, targets=shop.targets, **shop.common)
    assert report.written_by_table == {"orders": ORDERS, "items": ITEMS}
    shop.verify()


@BOTH_DATABASES
def test_changes_go_into_two_tables_by_their_own_rules(spark, shop):
    """Orders are upserted, items are change data, also where an item goes before its order does."""
    write_many(tagged(spark), batch_id="1", **TAG, targets=shop.targets, **shop.common)
    rows = "kind string, order_id bigint, customer string, item bigint, price int, op string, lsn bigint"
    changes = spark.createDataFrame(
        [
            ("item", 0, None, 0, 700, "u", 3),
            ("item", 0, None, 0, 600, "u", 2),
            ("item", 0, None, 1, None, "d", 4),
            ("item", 900, None, 0, 1, "c", 5),
            ("order", 900, "a new one", None, None, "c", 1),
            ("order", 1, "another", None, None, "u", 1),
        ],
        rows,
    )
    orders = {**shop.orders, "upsert_keys": ["order_id"]}
    items = {**shop.items, "upsert_keys": ["order_id", "item"], "op_column": "op", "order_column": "lsn"}
    write_many(changes, batch_id="2", **TAG, targets={"order": orders, "item": items}, **shop.common)
    assert shop.case.execute("SELECT customer FROM orders WHERE order_id IN (1, 900) ORDER BY order_id") == [
        ("another",),
        ("a new one",),
    ]
    found = shop.case.execute("SELECT item, price FROM items WHERE order_id IN (0, 900) ORDER BY order_id, item")
    assert found == [(0, 700), (2, 2), (0, 1)]
    assert shop.counts() == [ORDERS + 1, ITEMS, ORDERS + 2, ITEMS + 4]
    nothing_is_left(shop.case)


TASK_POINTS = ["claim.initialized", "write.produced", "spark.rows_copied", "batch.handed_over", "spark.task_done"]


@pytest.mark.parametrize("leg", LEGS)
def test_killed_tasks_are_run_again(spark, shop, leg):
    # With prepared rows, an item must be in the partition of its order.
    points = (
        TASK_POINTS
        if leg == "staging"
        else ["write.produced", "spark.rows_copied", "write.prepared", "spark.task_done"]
    )
    armed = json.dumps(dict(enumerate(points)))
    df = tagged(spark, partitions=len(points))
    shop.write(df, source="armed", batchId="1", inTasks=armed, keepSlots="false", databaseLeg=leg)
    shop.verify()


@pytest.mark.parametrize("leg", LEGS)
@pytest.mark.parametrize(
    ("point", "is_decided"),
    [("batch.recorded", False), ("batch.decided", True),
     pytest.param("batch.prepared", False, marks=pytest.mark.thorough),
     pytest.param("complete.ended", True, marks=pytest.mark.thorough)],
)  # fmt: skip
def test_the_process_that_decides_is_killed(spark, shop, leg, point, is_decided):
    write = partial(shop.write, tagged(spark, partitions=2), batchId="1", databaseLeg=leg)
    with pytest.raises(SPARKS_ERRORS):
        write(source="armed", inCommit=point, inAbort="settle.looked,claim.before")
    if leg == "staging":  # prepared rows appear when they are completed
        assert shop.table_counts() == ([ORDERS, ITEMS] if is_decided else [0, 0])
    write()
    shop.verify()


@pytest.mark.parametrize(
    ("numbers", "point"),
    [
        ("postgresql", "batch.recorded"),
        ("postgresql", "batch.decided"),
        # MariaDB's side of the decision is the same as in test_spark_mariadb.py, which kills a driver there.
        pytest.param("mariadb", "batch.recorded", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
        pytest.param("mariadb", "batch.decided", marks=[pytest.mark.mariadb, pytest.mark.thorough]),
    ],
    indirect=["numbers"],
)
def test_a_driver_of_write_many_is_killed(spark, shop, tmp_path, point):
    drivers = Drivers(tmp_path)
    source = str(tmp_path / "source")
    tagged(spark).write.parquet(source)
    document = {"do": "many", "settings": {**shop.common, **TAG, "targets": shop.targets}, "source": source}
    drivers.run(**document, failpoint=point, ends_with=-signal.SIGKILL)
    assert shop.case.execute("SELECT count(*) FROM items") == [(ITEMS if point == "batch.decided" else 0,)]
    report = write_many(tagged(spark), batch_id="1", **TAG, targets=shop.targets, **shop.common)
    assert report.written_rows == (0 if point == "batch.decided" else ORDERS + ITEMS)
    assert report.seconds > 0
    [(sources,)] = shop.case.execute("SELECT sources FROM dualwrite_batch")
    assert (sources is not None and source in sources) is (point == "batch.decided"), "the second driver reads no files"
    shop.verify()


@by_way_on_both_databases(["tagged", "split", "format"], quick=["tagged", "split", "format", "format-mariadb"])
def test_a_stream_over_two_targets_killed_on_the_way_writes_each_row_once(spark, shop, tmp_path, way):
    tagged(spark, partitions=4).write.parquet(str(tmp_path / "source"))
    rows = tagged(spark)

    def run(point=""):
        read = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", "2").parquet(str(tmp_path / "source"))
        if way == "format":
            stream = read.writeStream.format("armed").options(**shop.options(inCommit=point))
        else:
            write = foreach_many(
                split if way == "split" else None,
                **({} if way == "split" else {**TAG, "targets": shop.targets}),
                **shop.common,
            )
            stream = read.writeStream.foreachBatch(partial(stopped_at, write, point))
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        query = stream.start()
        query.awaitTermination()

    def split(df):
        orders = df.where("kind = 'order'").select("order_id", "customer")
        return [(orders, shop.orders), (df.where("kind = 'item'").select("order_id", "item", "price"), shop.items)]

    for point in ("batch.recorded", "batch.decided"):
        with pytest.raises(SPARKS_ERRORS):
            run(point)
    run()
    shop.verify()


def test_a_row_with_an_unknown_tag_or_none_fails_the_batch_and_is_named(spark, shop):
    for tag, words in ((None, "is null"), ("refund", "is 'refund'")):
        df = tagged(spark, partitions=1)
        kind = functions.when(df.order_id == 7, functions.lit(tag).cast("string")).otherwise(df.kind)
        with pytest.raises(
            JobFailed, match=rf"the tag column 'kind' {words} \(row 29 of partition 0\).*'order', 'item'"
        ):
            write_many(df.withColumn("kind", kind), batch_id="1", **TAG, targets=shop.targets, **shop.common)
    assert shop.counts() == [0, 0, 0, 0]
    nothing_is_left(shop.case)


def refusals(spark, shop):
    """What is refused before a task runs: the words, and the arguments of `write_many`."""
    rows, parts = tagged(spark), shop.parts(spark)
    by_tag = {**TAG, "targets": shop.targets}
    yield "there is nothing to write", [], {}
    yield "part 0 is not a pair", [rows], {}
    yield (
        "table 'orders' is the target of two parts",
        [parts[0], (parts[0][0], {**shop.orders, "table": "public.orders"})],
        {},
    )
    yield r"part 1: url \(url\) is for the batch", [parts[0], (parts[1][0], {**shop.items, "url": "x"})], {}
    yield "part 1: there is no setting 'tabel'", [parts[0], (parts[1][0], {**shop.items, "tabel": "x"})], {}
    yield "part 1: the setting table is missing", [parts[0], (parts[1][0], {"topic": shop.topics[1]})], {}
    yield "unit_topic announces batches of one topic", parts, {"unit_topic": "units"}
    yield (
        "allow_nondeterministic is for batches written partition by partition",
        parts,
        {"allow_nondeterministic": True},
    )
    yield "targets needs tag_column", parts, {"targets": shop.targets}
    yield "tag_column needs targets", rows, TAG
    yield "tag_column is for one DataFrame", parts, by_tag
    yield r"names the column 'sort', which the DataFrame does not have", rows, {**by_tag, "tag_column": "sort"}
    yield r"column 'order_id' of type bigint; it must be string", rows, {**by_tag, "tag_column": "order_id"}
    yield "no target takes the DataFrame's column 'pirce'", rows.withColumn("pirce", rows.price), by_tag
    yield "there is no table 'nowhere'", [parts[0], (parts[1][0], {**shop.items, "table": "nowhere"})], {}
    yield "there is no topic 'nowhere'", [parts[0], (parts[1][0], {**shop.items, "topic": "nowhere"})], {}
    upserts = {**by_tag, "targets": {**shop.targets, "order": {**shop.orders, "upsert_keys": ["order_id"]}}}
    yield "one of several by a tag column, need staging tables", rows, {**upserts, "database_leg": "prepared"}
    wrong = {**by_tag, "targets": {**shop.targets, "item": {**shop.items, "upsert_keys": ["order_id"]}}}
    yield "'items' has no unique key of just the columns order_id", rows, wrong


def test_what_does_not_fit_is_refused_before_a_task_runs(spark, shop):
    for words, parts, more in refusals(spark, shop):
        with pytest.raises(ConfigurationError, match=words) as refused:
            write_many(parts, batch_id="1", **more, **shop.common)
        assert refused.value.next_step or "give" in str(refused.value)
    assert shop.case.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    assert shop.counts() == [0, 0, 0, 0]


@pytest.fixture
def clerk(shop):
    """A role that may do all in the tables of the schema public, and may make tables there. Its name, and its URL."""
    role = f"clerk_{shop.case.sink.replace('-', '_')}"
    shop.case.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    shop.case.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    shop.case.execute(f"GRANT CREATE ON SCHEMA public TO {role}")
    before, _, after = shop.case.url.partition("://")
    yield role, f"{before}://{role}:secret@{after.rpartition('@')[2]}"
    shop.case.execute(f"DROP OWNED BY {role}")
    shop.case.execute(f"DROP ROLE {role}")


def test_a_right_that_is_missing_on_the_second_table_is_refused_before_a_task_runs(spark, shop, clerk):
    role, url = clerk
    shop.case.execute(f"REVOKE INSERT ON items FROM {role}")
    with pytest.raises(ConfigurationError, match="rows may not be inserted into 'items'"):
        write_many(shop.parts(spark), batch_id="1", **{**shop.common, "url": url})
    assert shop.case.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]


def test_all_tables_go_one_way_also_those_that_need_staging_tables(spark, shop, clerk):
    """Beside one of the tables none can be made, so all rows would be prepared. Only what can be prepared is."""
    role, url = clerk
    shop.case.execute("CREATE SCHEMA elsewhere")
    shop.case.execute("CREATE TABLE elsewhere.items AS SELECT * FROM items")
    shop.case.execute("CREATE TABLE elsewhere.aside (reason text, row text)")
    shop.case.execute(f"GRANT USAGE ON SCHEMA elsewhere TO {role}")
    shop.case.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA elsewhere TO {role}")
    targets = {"order": shop.orders, "item": {**shop.items, "table": "elsewhere.items"}}
    write = partial(write_many, tagged(spark), **TAG, **{**shop.common, "url": url})
    merged = {**targets, "order": {**shop.orders, "upsert_keys": ["order_id"]}}
    with pytest.raises(ConfigurationError, match="upserts into table 'orders', one of several by a tag column, need"):
        write(targets=merged, batch_id="1")
    options = {**options_of({**shop.common, **shop.orders, "url": url}), "quarantineTable": "elsewhere.aside"}
    orders = shop.parts(spark)[0][0]
    with pytest.raises(SPARKS_ERRORS, match="a table that is emptied first, need staging tables"):
        orders.write.format("dualwrite").mode("overwrite").options(**options, batchId="2").save()
    assert shop.case.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
    write(targets=targets, batch_id="3")
    assert shop.case.execute("SELECT count(*) FROM elsewhere.items") == [(ITEMS,)]
    assert shop.counts() == [ORDERS, 0, ORDERS, ITEMS]
    nothing_is_left(shop.case)


def test_the_format_refuses_targets_that_do_not_fit(spark, shop):
    df = tagged(spark)
    for words, more in (
        ("tagColumn and targets must be given together", {"targets": None}),
        ("the option targets is not JSON", {"targets": "{"}),
        ("must map each tag to the options of its target", {"targets": "[]"}),
        ("there is no option 'dbtabel'", {"targets": '{"a": {"dbtabel": "x"}}'}),
        (r"target 'a': max_slots \(maxSlots\) is for the batch", {"targets": '{"a": {"maxSlots": 3}}'}),
    ):
        with pytest.raises(SPARKS_ERRORS, match=words):
            given = {key: value for key, value in shop.options(batchId="1", **more).items() if value is not None}
            df.write.format("dualwrite").mode("append").options(**given).save()
    with pytest.raises(SPARKS_ERRORS, match=r'mode\("overwrite"\) is for one table'):
        df.write.format("dualwrite").mode("overwrite").options(**shop.options(batchId="1")).save()
    assert shop.case.execute("SELECT count(*) FROM dualwrite_slot") == [(0,)]
